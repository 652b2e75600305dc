"""The flags of the built-in trainer, YAML overrides and every start-up refusal."""

import argparse
import dataclasses

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.trainer.arguments import add_train_arguments, finish_train_arguments, loss_settings, optimizer_settings
from miles_sc.trainer.validation import check_engine, global_batch_size, validate_train_arguments

NEEDED = ["--hf-checkpoint", "model", "--num-rollout", "2", "--rollout-batch-size", "4"]
BASE = [*NEEDED, "--task", "chain_sum"]
CENTERED = [*BASE, "--loss-type", "score_centering", "--rollout-top-logprobs-num", "8"]


def parser_of_train():
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return parser


def parse(*flags):
    return parser_of_train().parse_args([str(flag) for flag in flags])


def finish(*flags):
    parser = parser_of_train()
    args = parser.parse_args([str(flag) for flag in flags])
    finish_train_arguments(args, parser)
    return args


KNOWN = {  # the names that users know, as given on a line and as they come out
    "--loss-type score_centering": ("loss_type", "score_centering", "policy_loss"),
    "--rollout-temperature 0.7": ("rollout_temperature", 0.7, 1.0),
    "--rollout-top-p 0.9": ("rollout_top_p", 0.9, 1.0),
    "--rollout-top-k 8": ("rollout_top_k", 8, -1),
    "--use-rollout-logprobs": ("use_rollout_logprobs", True, False),
    "--advantage-estimator grpo": ("advantage_estimator", "grpo", "grpo"),
    "--disable-grpo-std-normalization": ("disable_grpo_std_normalization", True, False),
    "--calculate-per-token-loss": ("calculate_per_token_loss", True, False),
    "--log-probs-chunk-size 64": ("log_probs_chunk_size", 64, -1),
    "--recompute-loss-function": ("recompute_loss_function", True, False),
    "--entropy-coef 0.01": ("entropy_coef", 0.01, 0.0),
    "--use-kl-loss": ("use_kl_loss", True, False),
    "--kl-loss-coef 0.1": ("kl_loss_coef", 0.1, 0.0),
    "--kl-loss-type low_var_kl": ("kl_loss_type", "low_var_kl", "k1"),
    "--use-unbiased-kl": ("use_unbiased_kl", True, False),
    "--ci-test": ("ci_test", True, False),
    "--train-backend megatron": ("train_backend", "megatron", "fsdp"),
    "--tensor-model-parallel-size 2": ("tensor_model_parallel_size", 2, 1),
    "--context-parallel-size 2": ("context_parallel_size", 2, 1),
    "--qkv-format thd": ("qkv_format", "thd", "bshd"),
    "--allgather-cp": ("allgather_cp", True, False),
    "--score-centering-observe": ("score_centering_observe", True, False),
    "--score-centering-is tis": ("score_centering_is", "tis", "none"),
    "--rollout-top-logprobs-num 128": ("rollout_top_logprobs_num", 128, 0),
}


@pytest.mark.parametrize("line", KNOWN)
def test_a_line_from_an_existing_launch_parses(line):
    name, value, default = KNOWN[line]
    assert getattr(parse(*BASE, *line.split()), name) == value
    assert getattr(parse(*BASE), name) == default


@pytest.mark.parametrize("flags", [BASE, CENTERED, [*CENTERED, "--rollout-top-k", 8, "--rollout-top-p", 0.9]])
def test_a_plain_line_is_whole(flags):
    """What the refusals below start from passes, so that each fails for its own reason."""
    assert finish(*flags).num_rollout == 2


REFUSED = [  # flags after the base line, message
    ("--max-turns 0", "--max-turns 0: set at least 1"),
    ("--max-turns 2", "--max-turns 2 without --observation: set what a wrong answer is told"),
    ("--over-sampling-batch-size 3", "--over-sampling-batch-size 3 is smaller than --rollout-batch-size 4: set at least"),
    ("--rollout-engine sglang --rollout-num-engines 0", "--rollout-num-engines 0: set at least 1"),
    (
        "--rollout-engine sglang --rollout-num-engines 2 --rollout-external-engine-addrs h:1",
        "--rollout-num-engines has no effect with --rollout-external-engine-addrs: no server is launched then",
    ),
    (
        "--rollout-engine sglang --sglang-python p --rollout-external-engine-addrs h:1",
        "--sglang-python has no effect with --rollout-external-engine-addrs",
    ),
    (
        "--rollout-engine sglang --sglang-server-args=--speculative-algorithm=EAGLE --rollout-top-logprobs-num 8",
        "--sglang-server-args '--speculative-algorithm=EAGLE': speculative decoding reports other log-probs",
    ),
    ("--rollout-engine sglang --sglang-router yes", "--sglang-router yes: give none, launch, or a URL"),
    ("--rollout-engine sglang --sglang-server-args '", "--sglang-server-args .*: No closing quotation; quote it"),
    ("--rollout-engine sglang --sglang-server-concurrency 0", "--sglang-server-concurrency 0: set at least 1"),
    ("--rollout-engine sglang --rollout-request-timeout nan", "--rollout-request-timeout nan: set a finite number of seconds"),
    ("--rollout-engine sglang --rollout-start-timeout 0", "--rollout-start-timeout 0.0: set a finite number of seconds"),
    # score centering, checked here once more because it is the launch that runs it
    ("--loss-type score_centering", "--loss-type score_centering with --rollout-top-logprobs-num 0: set the number"),
    ("--score-centering-observe", "--score-centering-observe with --rollout-top-logprobs-num 0: set the number"),
    ("--rollout-top-logprobs-num -4", "--rollout-top-logprobs-num -4: set a whole number of at least 0"),
    ("--score-centering-tis-clip 0", "--score-centering-tis-clip 0.0: set a finite number above 0"),
    ("--score-centering-mis-low 6", "--score-centering-mis-low 6.0 --score-centering-mis-high 5.0: set"),
    ("--rollout-temperature 0", "--rollout-temperature 0.0: set a finite number above 0"),
    ("--rollout-top-p 1.2", r"--rollout-top-p 1.2: set a number in \(0, 1\]"),
    ("--rollout-top-p 0.9", "--rollout-top-p 0.9 without --rollout-top-k: .*set a positive"),
    ("--rollout-top-k 0", "--rollout-top-k 0: set -1 for no limit"),
    ("--rollout-top-k 8", "--rollout-top-k 8 with --rollout-top-logprobs-num 0: .*set --rollout-top-logprobs-num to at least 8"),
    (
        "--rollout-top-k 8 --rollout-top-logprobs-num 4",
        "--rollout-top-logprobs-num 4 is smaller than --rollout-top-k 8: .*at least 8",
    ),
    ("--advantage-estimator gae", "--advantage-estimator gae: the built-in trainer has grpo only"),
    (
        "--loss-type score_centering --rollout-top-logprobs-num 8 --advantage-estimator gae",
        "--advantage-estimator gae with --loss-type score_centering: .*set --advantage-estimator grpo",
    ),
    (
        "--loss-type score_centering --rollout-top-logprobs-num 8 --use-tis",
        "--use-tis .* with --loss-type score_centering: .*--score-centering-is tis",
    ),
    # counts
    ("--num-rollout 0", "--num-rollout 0: set at least 1"),
    ("--rollout-batch-size 0", "--rollout-batch-size 0: set at least 1"),
    ("--n-samples-per-prompt 0", "--n-samples-per-prompt 0: set at least 1"),
    ("--rollout-max-response-len 0", "--rollout-max-response-len 0: set at least 1"),
    ("--held-out 0", "--held-out 0: set at least 1"),
    ("--rollout-staleness -1", "--rollout-staleness -1: set at least 0"),
    ("--micro-batch-size 0", "--micro-batch-size 0: set at least 1"),
    ("--max-tokens-per-gpu 0", "--max-tokens-per-gpu 0: set at least 1"),
    ("--global-batch-size 0", "--global-batch-size 0: set at least 1"),
    ("--num-steps-per-rollout 0", "--num-steps-per-rollout 0: set at least 1"),
    ("--actor-num-gpus-per-node 0", "--actor-num-gpus-per-node 0: set at least 1"),
    ("--eval-interval -1", "--eval-interval -1: set at least 0"),
    ("--save-interval 0", "--save-interval 0: set at least 1"),
    ("--compare-seeds 0", "--compare-seeds 0: set at least 1"),
    ("--rollout-seed -1", "--rollout-seed -1: set at least 0"),
    # batches
    (
        "--global-batch-size 64",
        "32 samples per rollout .* do not divide into optimizer steps of 64: set --global-batch-size to a divisor",
    ),
    ("--global-batch-size 5", r"32 samples .*--rollout-batch-size 4 x --n-samples-per-prompt 8.* of 5: set --global-batch-size"),
    ("--num-steps-per-rollout 3", "--num-steps-per-rollout 3 does not divide the 32 samples of a rollout"),
    ("--num-steps-per-rollout 64", "--num-steps-per-rollout 64 does not divide the 32 samples"),
    ("--num-steps-per-rollout 2 --global-batch-size 8", "give one of --global-batch-size and --num-steps-per-rollout"),
    (
        "--actor-num-gpus-per-node 3",
        "--global-batch-size 32 does not divide over 3 data-parallel ranks .*: set a multiple",
    ),
    ("--use-dynamic-batch-size", "--use-dynamic-batch-size without --max-tokens-per-gpu: set how many tokens"),
    ("--n-samples-per-prompt 1", "--n-samples-per-prompt 1: .*at least 2, or set --disable-rewards-normalization"),
    # layout
    ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: .*data-parallel; set 1, or --train-backend megatron"),
    ("--context-parallel-size 2", "--context-parallel-size 2: .*set 1, or --train-backend megatron"),
    ("--train-backend megatron --context-parallel-size 0", "--context-parallel-size 0: set at least 1"),
    (
        "--train-backend megatron --tensor-model-parallel-size 2 --context-parallel-size 2 --actor-num-gpus-per-node 6",
        "--actor-num-gpus-per-node 6 is no multiple of .*: set a multiple of 4",
    ),
    (
        "--train-backend megatron --tensor-model-parallel-size 2 --actor-num-gpus-per-node 6 --global-batch-size 8",
        "--global-batch-size 8 does not divide over 3 data-parallel ranks",
    ),
    # losses and sampler
    ("--rollout-mismatch int3", "--rollout-mismatch 'int3' is not one of"),
    ("--rollout-mismatch noise:-1", "--rollout-mismatch"),
    ("--tis-clip-low 3", "--tis-clip-low 3.0 --tis-clip 2.0: set 0 <= low <= high"),
    ("--tis-clip 0", "--tis-clip-low 0.0 --tis-clip 0.0: .*high above 0"),
    ("--tis-clip nan", "--tis-clip nan: set"),
    ("--eps-clip 0", "--eps-clip 0.0 .*: set numbers above 0"),
    ("--eps-clip-high -0.1", "--eps-clip-high -0.1: set numbers above 0"),
    ("--log-probs-chunk-size 0", "--log-probs-chunk-size 0: set a positive number of rows, or -1"),
    ("--lr -1", "--lr -1.0: set a number of at least 0"),
    ("--lr nan", "--lr nan: set"),
    ("--lr inf", "--lr inf: set"),
    ("--prompt-data f.jsonl", "give exactly one of --task and --prompt-data"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_a_refusal_names_flag_value_and_remedy(flags, message):
    with pytest.raises(ValueError, match=message):
        finish(*BASE, *flags.split())


def test_a_task_or_data_is_needed():
    with pytest.raises(ValueError, match="give exactly one of --task and --prompt-data: what should the model learn"):
        finish(*NEEDED)
    assert finish(*NEEDED, "--prompt-data", "f.jsonl").task is None


@pytest.mark.parametrize(
    "flags",
    [
        "--n-samples-per-prompt 1 --disable-rewards-normalization",
        "--allgather-cp",
        "--rollout-top-k 8 --rollout-top-p 0.9 --rollout-top-logprobs-num 8",
        "--num-steps-per-rollout 4 --actor-num-gpus-per-node 2",
        "--use-dynamic-batch-size --max-tokens-per-gpu 100",
        "--rollout-mismatch noise:0.01 --rollout-staleness 2 --train-async",
        "--use-tis --tis-mode mask --tis-clip-low 0.5",
        "--max-turns 2 --observation no",
        "--over-sampling-batch-size 8 --partial-rollout",
        "--rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:1 127.0.0.1:2 --sglang-router http://127.0.0.1:3",
        "--rollout-engine sglang --rollout-num-engines 2 --sglang-router launch --update-weights-by tensor",
    ],
)
def test_what_belongs_together_passes(flags):
    assert vars(finish(*BASE, *flags.split())) == vars(parse(*BASE, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "size"), [("", 32), ("--global-batch-size 8", 8), ("--num-steps-per-rollout 4", 8), ("--n-samples-per-prompt 2", 8)]
)
def test_samples_per_optimizer_step(flags, size):
    assert global_batch_size(finish(*BASE, *flags.split())) == size


# --- what the rest of the trainer is told


def test_loss_settings_carry_every_flag():
    line = "--loss-type policy_loss --rollout-top-logprobs-num 8 --score-centering-observe --eps-clip 0.1 --eps-clip-high 0.3"
    line += " --use-tis --tis-mode mask --tis-clip 1.5 --tis-clip-low 0.5 --entropy-coef 0.01 --observe-training-entropy"
    line += " --use-kl-loss --kl-loss-coef 0.2 --kl-loss-type k3 --use-unbiased-kl --log-probs-chunk-size 64"
    args = finish(*BASE, *line.split())
    settings = loss_settings(args, vocab_size=77)
    assert not loss_settings(finish(*BASE, "--recompute-loss-function"), vocab_size=77).inplace_backward
    got = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    assert got == {
        "score_centering": ScoreCenteringConfig.from_args(args),
        "observe": True,
        "inplace_backward": True,
        "eps_clip": 0.1,
        "eps_clip_high": 0.3,
        "use_tis": True,
        "tis_mode": "mask",
        "tis_clip": 1.5,
        "tis_clip_low": 0.5,
        "entropy_coef": 0.01,
        "observe_entropy": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
        "log_probs_chunk_size": 64,
        "vocab_size": 77,
        "tensor_parallel_group": None,
    }
    assert loss_settings(finish(*BASE, "--eps-clip", 0.1), vocab_size=7).eps_clip_high == 0.1


def test_optimizer_settings_carry_every_flag():
    line = "--optimizer sgd --lr 0.1 --lr-warmup-iters 7 --weight-decay 0.2 --adam-beta1 0.3"
    line += " --adam-beta2 0.4 --adam-eps 0.5 --clip-grad 0.6"
    assert optimizer_settings(parse(*BASE, *line.split())) == OptimizerSettings("sgd", 0.1, 7, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert optimizer_settings(parse(*BASE)) == OptimizerSettings()


# --- help


def test_every_flag_says_what_it_does_in_a_group_of_its_own():
    parser = parser_of_train()
    titles = [group.title for group in parser._action_groups if group._group_actions]
    assert titles == [
        "options",
        "model and task",
        "rollout",
        "rollout engine",
        "training",
        "loss",
        "score centering",
        "layout",
        "output, checkpoints and comparison",
    ]
    ungrouped = [action.dest for action in parser._optionals._group_actions]
    assert ungrouped == ["help"]
    assert not [action.dest for action in parser._actions if not action.help]
    text = " ".join(parser.format_help().split())
    assert all(action.option_strings[0] in text for action in parser._actions)


def test_defaults_pass_and_are_stated_as_they_are():
    """A default that help states differently from what the parser uses would mislead."""
    for action in parser_of_train()._actions:
        if "(default: %(default)s" in action.help or action.help.startswith("default: %(default)s"):
            assert action.default is not None and action.default is not argparse.SUPPRESS, action.dest
    validate_train_arguments(parse(*BASE))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kl-loss-coef 0.1", "--kl-loss-coef has no effect without --use-kl-loss"),
        ("--use-unbiased-kl", "--use-unbiased-kl has no effect without --use-kl-loss"),
        ("--ref-load x", "--ref-load has no effect without --use-kl-loss"),
        ("--max-tokens-per-gpu 64", "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size"),
        ("--compare-seeds 2", "--compare-seeds has no effect without --compare"),
        ("--observation no", "--observation has no effect without --max-turns of at least 2"),
        ("--partial-rollout", "--partial-rollout has no effect without --over-sampling-batch-size"),
        ("--rollout-num-engines 2", "--rollout-num-engines has no effect without --rollout-engine sglang"),
        ("--rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine has no effect without --rollout-engine sglang"),
        ("--rollout-external-engine-addrs h:1", "--rollout-external-engine-addrs has no effect without --rollout-engine sglang"),
        ("--sglang-python p", "--sglang-python has no effect without --rollout-engine sglang"),
        ("--sglang-server-args=--tp", "--sglang-server-args has no effect without --rollout-engine sglang"),
        ("--sglang-router launch", "--sglang-router has no effect without --rollout-engine sglang"),
        ("--sglang-server-concurrency 8", "--sglang-server-concurrency has no effect without --rollout-engine sglang"),
        ("--rollout-request-timeout 9", "--rollout-request-timeout has no effect without --rollout-engine sglang"),
        ("--rollout-start-timeout 9", "--rollout-start-timeout has no effect without --rollout-engine sglang"),
        ("--update-weights-by tensor", "--update-weights-by has no effect without --rollout-engine sglang"),
        ("--score-centering-is tis", "--score-centering-is has no effect without --loss-type score_centering"),
        ("--use-tis --use-rollout-logprobs", "p_old is then q and every weight 1"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        finish(*BASE, *flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "--weight-decay -1", "--clip-grad -1", "--adam-eps nan", "--entropy-coef nan", "--tis-clip inf", "--kl-loss-coef inf",
        "--adam-beta2 1", "--adam-beta1 -0.1", "--lr nan", "--lr -1",
    ],
)  # fmt: skip
def test_numbers_that_would_spoil_a_run_are_refused(flags):
    flag, value = flags.split()
    with pytest.raises(ValueError, match=f"{flag} .*: set a"):
        finish(*BASE, *flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rollout-engine sglang", "SGLang is not installed beside this interpreter; set --sglang-python"),
        ("--rollout-engine sglang --sglang-python no/python", "--sglang-python no/python: no program there; set"),
        ("--rollout-engine sglang --sglang-python false", "--sglang-python false: SGLang is not installed there; set"),
        ("--rollout-engine sglang --sglang-server-args=--port=1", "server_args holds --port=1: miles_sc chooses"),
        ("--rollout-engine sglang --rollout-external-engine-addrs h:1 h:1", "one of them is there twice"),
    ],
)
def test_servers_need_an_environment_to_be_launched_from(flags, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check_engine(finish(*BASE, *flags.split()))


@pytest.mark.parametrize(
    "flags", ["", "--rollout-engine sglang --rollout-external-engine-addrs h:1", "--rollout-engine sglang --sglang-python true"]
)
def test_nothing_else_does(flags):
    check_engine(finish(*BASE, *flags.split()))
