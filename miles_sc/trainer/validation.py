"""The rules that the flags of ``miles-sc train`` must satisfy together, after every override."""

import argparse
import importlib.util
import shlex
import shutil
import subprocess
from pathlib import Path

from transformers import AutoConfig

from miles_sc.arguments import validate_score_centering_arguments
from miles_sc.backends.megatron_support import check_supported
from miles_sc.config import LARGEST_FLOAT, LOSS_TYPE, ScoreCenteringConfig
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.rollout.model_directory import model_vocabulary
from miles_sc.trainer.layout import data_parallel_size, validate_layout, world_size

_AT_LEAST = {
    "num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1, "rollout_max_response_len": 1, "held_out": 1,
    "rollout_staleness": 0, "micro_batch_size": 1, "max_tokens_per_gpu": 1, "global_batch_size": 1, "num_steps_per_rollout": 1,
    "actor_num_gpus_per_node": 1, "eval_interval": 0, "save_interval": 1, "compare_seeds": 1, "rollout_seed": 0,
    "lr_warmup_iters": 0, "max_turns": 1, "over_sampling_batch_size": 1, "rollout_num_engines": 1, "sglang_server_concurrency": 1,
    "rollout_num_gpus_per_engine": 1,
}  # fmt: skip


# Flags of SGLang servers with their defaults: of any, and of those that are launched.
_SERVERS = {
    "sglang_router": "none", "update_weights_by": "disk", "sglang_server_concurrency": 64, "rollout_request_timeout": 600.0,
    "rollout_external_engine_addrs": None,
}  # fmt: skip
_LAUNCHED_SERVERS = {
    "rollout_num_engines": 1, "rollout_num_gpus_per_engine": 1, "sglang_python": None, "sglang_server_args": "",
    "rollout_start_timeout": 600.0,
}  # fmt: skip

# Flags that would be ignored in silence.
_WITHOUT_EFFECT = (
    ("--kl-loss-coef", "--use-kl-loss", lambda args: args.kl_loss_coef != 0 and not args.use_kl_loss),
    ("--use-unbiased-kl", "--use-kl-loss", lambda args: args.use_unbiased_kl and not args.use_kl_loss),
    ("--ref-load", "--use-kl-loss", lambda args: args.ref_load is not None and not args.use_kl_loss),
    (
        "--max-tokens-per-gpu", "--use-dynamic-batch-size",
        lambda args: args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size,
    ),
    ("--observation", "--max-turns of at least 2", lambda args: args.observation is not None and args.max_turns == 1),
    (
        "--partial-rollout", "--over-sampling-batch-size",
        lambda args: args.partial_rollout and args.over_sampling_batch_size is None,
    ),
    ("--compare-seeds", "--compare", lambda args: args.compare_seeds != 1 and args.compare is None),
    (
        "--score-centering-is", f"--loss-type {LOSS_TYPE} or --score-centering-observe",
        lambda args: args.score_centering_is != "none" and args.loss_type != LOSS_TYPE
        and not (args.score_centering_observe or args.compare),
    ),
)  # fmt: skip

_NOT_NEGATIVE = ("lr", "weight_decay", "adam_eps", "clip_grad", "tis_clip_low")
_FINITE = ("adam_beta1", "adam_beta2", "entropy_coef", "kl_loss_coef", "eps_clip", "eps_clip_high", "tis_clip")


def _validate_numbers(args: argparse.Namespace) -> None:
    for name in (*_NOT_NEGATIVE, *_FINITE):
        value = getattr(args, name)
        if value is not None and not abs(value) < LARGEST_FLOAT:  # NaN too
            raise ValueError(f"{_flag(name)} {value}: set a finite number")
        if name in _NOT_NEGATIVE and value < 0:
            raise ValueError(f"{_flag(name)} {value}: set a number of at least 0")
    if args.adam_eps == 0:
        raise ValueError("--adam-eps 0: a parameter without gradient would become 0/0; set a number above 0")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(args, name)}: set a number in [0, 1)")


def validate_train_arguments(args: argparse.Namespace) -> None:
    """The start-up contract of the built-in trainer, after every override."""
    validate_score_centering_arguments(args)
    ScoreCenteringConfig.from_args(args)  # our sampler's bounds hold for every loss
    if args.rollout_seed >= 1 << 32:
        raise ValueError(f"--rollout-seed {args.rollout_seed}: set a number below 2^32")
    for name, least in _AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{_flag(name)} {value}: set at least {least}")
    if args.loss_type not in ("policy_loss", LOSS_TYPE):
        raise ValueError(f"--loss-type {args.loss_type}: choose policy_loss or {LOSS_TYPE}")
    if args.advantage_estimator != "grpo":
        raise ValueError(f"--advantage-estimator {args.advantage_estimator}: the built-in trainer has grpo only")
    if (args.task is None) == (args.prompt_data is None):
        raise ValueError("give exactly one of --task and --prompt-data: what should the model learn?")
    parse_mismatch(args.rollout_mismatch)
    _validate_rollout(args)
    validate_layout(args)
    _validate_numbers(args)
    _validate_losses(args)
    for flag, companion, is_set in _WITHOUT_EFFECT:
        if is_set(args):
            raise ValueError(f"{flag} has no effect without {companion}: add that, or leave {flag} out")
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None and args.global_batch_size is not None:
        raise ValueError("give one of --global-batch-size and --num-steps-per-rollout: each follows from the other")
    if args.num_steps_per_rollout is not None and samples % args.num_steps_per_rollout:
        raise ValueError(
            f"--num-steps-per-rollout {args.num_steps_per_rollout} does not divide the {samples} samples of a rollout "
            f"(--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}): set another"
        )
    step = global_batch_size(args)
    if samples % step:
        raise ValueError(
            f"{samples} samples per rollout (--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt "
            f"{args.n_samples_per_prompt}) do not divide into optimizer steps of {step}: set --global-batch-size to a divisor"
        )
    if step % data_parallel_size(args):
        raise ValueError(
            f"--global-batch-size {step} does not divide over {data_parallel_size(args)} data-parallel ranks "
            f"(--actor-num-gpus-per-node {world_size(args)} / tensor and context parallel size): set a multiple"
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        raise ValueError("--use-dynamic-batch-size without --max-tokens-per-gpu: set how many tokens one forward pass may hold")


def _validate_rollout(args: argparse.Namespace) -> None:
    for name in ("rollout_request_timeout", "rollout_start_timeout"):
        if not 0 < getattr(args, name) < LARGEST_FLOAT:
            raise ValueError(f"{_flag(name)} {getattr(args, name)}: set a finite number of seconds above 0")
    if args.max_turns > 1 and not args.observation:
        raise ValueError(
            f"--max-turns {args.max_turns} without --observation: set what a wrong answer is told, e.g. ' Wrong, again: '"
        )
    if args.over_sampling_batch_size is not None and args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is smaller than --rollout-batch-size "
            f"{args.rollout_batch_size}: set at least as many"
        )
    for name, default in (_SERVERS | _LAUNCHED_SERVERS).items():
        if getattr(args, name) != default and args.rollout_engine != "sglang":
            raise ValueError(f"{_flag(name)} has no effect without --rollout-engine sglang: add that, or leave {_flag(name)} out")
    for name, default in _LAUNCHED_SERVERS.items():
        if getattr(args, name) != default and args.rollout_external_engine_addrs:
            raise ValueError(
                f"{_flag(name)} has no effect with --rollout-external-engine-addrs: no server is launched then; leave one out"
            )
    try:
        words = shlex.split(args.sglang_server_args)
    except ValueError as error:
        raise ValueError(f"--sglang-server-args {args.sglang_server_args!r}: {error}; quote it as for a shell") from error
    if args.rollout_top_logprobs_num and any(word.startswith("--speculative-alg") for word in words):
        raise ValueError(
            f"--sglang-server-args {args.sglang_server_args!r}: speculative decoding reports other log-probs than it samples "
            "from; leave it out"
        )
    router = args.sglang_router
    if router not in ("none", "launch") and "://" not in router:
        raise ValueError(f"--sglang-router {router}: give none, launch, or a URL such as http://127.0.0.1:30000")


def _validate_losses(args: argparse.Namespace) -> None:
    if args.rollout_top_k > 0 and args.rollout_top_logprobs_num == 0:
        raise ValueError(
            f"--rollout-top-k {args.rollout_top_k} with --rollout-top-logprobs-num 0: filtered sampling is trained over its "
            f"recorded support; set --rollout-top-logprobs-num to at least {args.rollout_top_k}"
        )
    if args.n_samples_per_prompt == 1 and not args.disable_rewards_normalization:
        raise ValueError(
            "--n-samples-per-prompt 1: a group of one has no advantage over its own mean; sample at least 2, or set "
            "--disable-rewards-normalization"
        )
    if not 0 <= args.tis_clip_low <= args.tis_clip or not args.tis_clip > 0:
        raise ValueError(f"--tis-clip-low {args.tis_clip_low} --tis-clip {args.tis_clip}: set 0 <= low <= high and high above 0")
    if not args.eps_clip > 0 or (args.eps_clip_high is not None and not args.eps_clip_high > 0):
        raise ValueError(f"--eps-clip {args.eps_clip} --eps-clip-high {args.eps_clip_high}: set numbers above 0")
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size < 1:
        raise ValueError(f"--log-probs-chunk-size {args.log_probs_chunk_size}: set a positive number of rows, or -1")
    if args.use_tis and args.use_rollout_logprobs:
        raise ValueError("--use-tis with --use-rollout-logprobs: p_old is then q and every weight 1; leave one of them out")


def check_model_directories(args: argparse.Namespace) -> None:
    """Refuses what a look at the models' ``config.json`` shows, before any process starts.

    Raises:
        ValueError: no model there, more candidates than its vocabulary has, a reference with another vocabulary, a model that
            the backend does not build.
    """
    vocabularies = {}
    for flag, path in (("--hf-checkpoint", args.hf_checkpoint), ("--ref-load", args.ref_load)):
        if path is None:
            continue
        config = Path(path) / "config.json"
        if not config.is_file():
            raise ValueError(
                f"{flag} {path}: no Hugging Face model there (config.json is missing); give a model directory, or make one with "
                "`miles-sc make-model`"
            )
        try:
            vocabularies[flag] = model_vocabulary(Path(path))
        except ValueError as error:
            raise ValueError(f"{flag} {path}: {error}") from error
        if isinstance(vocabularies[flag], int):
            ScoreCenteringConfig.from_args(args).check_vocabulary(vocabularies[flag])
        if args.train_backend == "megatron":
            check_supported(AutoConfig.from_pretrained(path, local_files_only=True), args.tensor_model_parallel_size)
    if len(set(vocabularies.values())) > 1:
        raise ValueError(
            f"--ref-load {args.ref_load} has a vocabulary of {vocabularies['--ref-load']} and the policy one of "
            f"{vocabularies['--hf-checkpoint']}: their log-probs cannot be compared; give a reference with the same vocabulary"
        )


def check_engine(args: argparse.Namespace) -> None:
    """Refuses servers that could not be had, before any process starts.

    Raises:
        ValueError: flags of theirs that we own, an address that stands twice, no interpreter or no SGLang to launch them from.
    """
    if args.rollout_engine != "sglang":
        return
    from miles_sc.trainer.sglang_engine import sglang_settings  # an HTTP client that nobody else needs

    sglang_settings(args)
    if args.rollout_external_engine_addrs:
        return
    remedy = (
        "set --sglang-python to an interpreter that has it (scripts/setup_sglang_cpu.sh makes one for CPUs), or connect to "
        "running servers with --rollout-external-engine-addrs"
    )
    if args.sglang_python is None and importlib.util.find_spec("sglang") is None:
        raise ValueError(f"--rollout-engine sglang: SGLang is not installed beside this interpreter; {remedy}")
    if args.sglang_python is None:
        return
    if shutil.which(args.sglang_python) is None:
        raise ValueError(f"--sglang-python {args.sglang_python}: no program there; {remedy}")
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    if subprocess.run([args.sglang_python, "-c", look], stderr=subprocess.DEVNULL).returncode:
        raise ValueError(f"--sglang-python {args.sglang_python}: SGLang is not installed there; {remedy}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def global_batch_size(args: argparse.Namespace) -> int:
    """Samples per optimizer step."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        return max(samples // args.num_steps_per_rollout, 1)
    return args.global_batch_size or samples
