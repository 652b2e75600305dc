"""Flags of ``miles-sc train``, under the names that Miles users know, and what the trainer's parts are told of them."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from miles_sc.arguments import add_score_centering_arguments
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.config import LOSS_TYPE, ScoreCenteringConfig
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.policy import TIS_MODES
from miles_sc.loss.regularizers import KL_TYPES
from miles_sc.trainer.validation import validate_train_arguments


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``miles-sc train``, grouped as ``--help`` shows them."""
    _add_model_and_task(parser.add_argument_group("model and task"))
    _add_rollout(parser.add_argument_group("rollout"))
    _add_engine(parser.add_argument_group("rollout engine"))
    _add_training(parser.add_argument_group("training"))
    _add_loss(parser.add_argument_group("loss"))
    add_score_centering_arguments(parser.add_argument_group("score centering"))
    _add_layout(parser.add_argument_group("layout"))
    _add_output(parser.add_argument_group("output, checkpoints and comparison"))


def add_task_arguments(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Which problems, which reward, and how many are kept for evaluation."""
    add = group.add_argument
    add("--task", metavar="NAME", help="a reasoning-gym task, e.g. chain_sum; its own verifier is the reward")
    add("--task-option", action="append", default=[], metavar="KEY=VALUE", help="an option of the task; may be repeated")
    add("--prompt-data", metavar="FILE", help="JSONL of prompts and answers, instead of --task")
    add("--input-key", default="input", help="prompt field of --prompt-data (default: %(default)s)")
    add("--label-key", default="label", help="answer field of --prompt-data (default: %(default)s)")
    add(
        "--rm-type", metavar="RULE",
        help="reward rule: exact, number or contains for --prompt-data; constant:<value> for any task (default: the task's own)",
    )  # fmt: skip
    add(
        "--held-out",
        type=int,
        default=128,
        metavar="N",
        help="problems kept for evaluation, never trained on (default: %(default)s)",
    )


def _add_model_and_task(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hf-checkpoint", required=True, metavar="DIR", help="Hugging Face directory of the model to train")
    add("--ref-load", metavar="DIR", help="reference model of --use-kl-loss (default: --hf-checkpoint)")
    add_task_arguments(group)
    add("--apply-chat-template", action="store_true", help="wrap each prompt in the tokenizer's chat template")


def _add_rollout(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-rollout", type=int, required=True, metavar="N", help="rollouts in the whole run")
    add("--rollout-batch-size", type=int, required=True, metavar="N", help="prompts per rollout")
    add(
        "--n-samples-per-prompt",
        type=int,
        default=8,
        metavar="N",
        help="responses per prompt, one GRPO group (default: %(default)s)",
    )
    add("--rollout-max-response-len", type=int, default=64, metavar="N", help="most tokens in a response (default: %(default)s)")
    add("--rollout-temperature", type=float, default=1.0, metavar="T", help="sampler's temperature (default: %(default)s)")
    add(
        "--rollout-top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus of the sampler; 1 is unfiltered (default: %(default)s)",
    )
    add(
        "--rollout-top-k", type=int, default=-1, metavar="N", help="top-k of the sampler; -1 is unfiltered (default: %(default)s)"
    )
    add("--rollout-seed", type=int, default=42, metavar="N", help="seed of prompts and sampling (default: %(default)s)")
    add(
        "--max-turns", type=int, default=1, metavar="N",
        help="turns in a response: the policy is told --observation after one that earns less than 1 (default: %(default)s)",
    )  # fmt: skip
    add("--observation", metavar="TEXT", help="what a wrong answer is told before the next turn of --max-turns")
    add(
        "--over-sampling-batch-size", type=int, metavar="N",
        help="prompts sampled at once; when --rollout-batch-size of them are complete the others are stopped",
    )  # fmt: skip
    add("--partial-rollout", action="store_true", help="continue stopped responses in the next rollout, with its weights")
    add(
        "--rollout-mismatch", default="none", metavar="KIND",
        help="make the sampler differ from the trainer: none, int8, int4 or noise:<sigma> (default: %(default)s)",
    )  # fmt: skip
    add(
        "--rollout-staleness",
        type=int,
        default=0,
        metavar="N",
        help="sample with the weights of N updates ago (default: %(default)s)",
    )
    add("--train-async", action="store_true", help="generate the next rollout while this one trains (one update stale)")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rollout-engine", choices=("embedded", "sglang"), default="embedded",
        help="what generates: a sampler in the trainer's own process, or SGLang servers (default: %(default)s)",
    )  # fmt: skip
    add("--rollout-num-engines", type=int, default=1, metavar="N", help="SGLang servers to launch (default: %(default)s)")
    add("--rollout-num-gpus-per-engine", type=int, default=1, metavar="N", help="GPUs of each (default: %(default)s)")
    add(
        "--rollout-external-engine-addrs", nargs="+", metavar="HOST:PORT",
        help="running SGLang servers to connect to; none is launched then",
    )  # fmt: skip
    add("--sglang-python", metavar="FILE", help="interpreter of the environment that holds SGLang (default: this one)")
    add("--sglang-server-args", default="", metavar="WORDS", help="more flags for each launched server, as one quoted text")
    add(
        "--sglang-router", default="none", metavar="none|launch|URL",
        help="route generation through a router: launch sglang-router, or use a running one (default: %(default)s)",
    )  # fmt: skip
    add(
        "--update-weights-by", choices=("disk", "distributed", "tensor"), default="disk",
        help="how SGLang gets new weights: files, a process group, or shared memory (default: %(default)s)",
    )  # fmt: skip
    add(
        "--sglang-server-concurrency", type=int, default=64, metavar="N",
        help="calls under way at once on each server, or on the router (default: %(default)s)",
    )  # fmt: skip
    add(
        "--rollout-request-timeout", type=float, default=600.0, metavar="S",
        help="seconds for one answer before it is asked for again (default: %(default)s)",
    )  # fmt: skip
    add(
        "--rollout-start-timeout", type=float, default=600.0, metavar="S",
        help="seconds for a launched server to become healthy (default: %(default)s)",
    )  # fmt: skip


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--global-batch-size", type=int, metavar="N", help="samples per optimizer step (default: the whole rollout)")
    add("--num-steps-per-rollout", type=int, metavar="N", help="optimizer steps per rollout, instead of --global-batch-size")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="samples per forward pass (default: %(default)s)")
    add("--use-dynamic-batch-size", action="store_true", help="fill forward passes up to --max-tokens-per-gpu instead")
    add("--max-tokens-per-gpu", type=int, metavar="N", help="tokens per forward pass and rank, padding included")
    add("--optimizer", choices=("adam", "sgd"), default="adam", help="AdamW or plain SGD (default: %(default)s)")
    add("--lr", type=float, default=1e-6, help="learning rate (default: %(default)s)")
    add("--lr-warmup-iters", type=int, default=0, metavar="N", help="optimizer steps of linear warm-up (default: %(default)s)")
    add("--weight-decay", type=float, default=0.0, help="default: %(default)s")
    add("--adam-beta1", type=float, default=0.9, help="default: %(default)s")
    add("--adam-beta2", type=float, default=0.999, help="default: %(default)s")
    add("--adam-eps", type=float, default=1e-8, help="default: %(default)s")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0 is no limit (default: %(default)s)")
    add("--bf16", action="store_true", help="compute in bfloat16; master weights stay float32")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in backward")


def _add_loss(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--loss-type", choices=("policy_loss", LOSS_TYPE), default="policy_loss", help="default: %(default)s")
    add("--advantage-estimator", default="grpo", help="default: %(default)s, the only one")
    add("--disable-grpo-std-normalization", action="store_true", help="do not divide a group's rewards by their spread")
    add("--disable-rewards-normalization", action="store_true", help="do not subtract a group's mean reward either")
    add("--calculate-per-token-loss", action="store_true", help="every token counts alike, instead of every sample")
    add("--use-rollout-logprobs", action="store_true", help="the sampler's log-probs are the old policy; no extra forward pass")
    add("--eps-clip", type=float, default=0.2, help="PPO clip of policy_loss (default: %(default)s)")
    add("--eps-clip-high", type=float, help="its upper side (default: --eps-clip)")
    add("--use-tis", action="store_true", help="weight policy_loss by p_old / q, see the next three")
    add(
        "--tis-mode",
        choices=TIS_MODES,
        default="truncate",
        help="truncate the weight into the band, or mask outside (default: %(default)s)",
    )
    add("--tis-clip", type=float, default=2.0, help="upper end of the band (default: %(default)s)")
    add("--tis-clip-low", type=float, default=0.0, help="lower end of the band (default: %(default)s)")
    add("--entropy-coef", type=float, default=0.0, help="default: %(default)s")
    add("--observe-training-entropy", action="store_true", help="log the entropy even where it is not in the loss")
    add("--use-kl-loss", action="store_true", help="add the KL to the reference model")
    add("--kl-loss-coef", type=float, default=0.0, help="default: %(default)s")
    add("--kl-loss-type", choices=KL_TYPES, default="k1", help="default: %(default)s")
    add("--use-unbiased-kl", action="store_true", help="weight the KL by p / q")
    add("--recompute-loss-function", action="store_true", help="rerun the loss in backward instead of keeping what it saves")
    add(
        "--log-probs-chunk-size",
        type=int,
        default=-1,
        metavar="N",
        help="rows scored at a time; -1 suits the device (default: %(default)s)",
    )
    add("--ci-test", action="store_true", help="check scoring against a dense float64 softmax on every rollout")


def _add_layout(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--train-backend", choices=("megatron", "fsdp"), default="fsdp", help="default: %(default)s")
    add(
        "--actor-num-gpus-per-node", type=int, metavar="N",
        help="training ranks: GPUs, or CPU processes where there is no GPU (default: tensor x context parallel size)",
    )  # fmt: skip
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="megatron only (default: %(default)s)")
    add("--context-parallel-size", type=int, default=1, metavar="N", help="megatron only (default: %(default)s)")
    add(
        "--qkv-format", choices=("thd", "bshd"), default="bshd",
        help="thd packs samples into one row, bshd pads each to a row of its own (default: %(default)s)",
    )  # fmt: skip
    add("--allgather-cp", action="store_true", help="all-gather context parallelism; no effect at --context-parallel-size 1")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-dir", default="runs/train", metavar="DIR", help="metrics, report and checkpoints go here (default: %(default)s)"
    )
    add("--save", metavar="DIR", help="checkpoints (default: <output-dir>/checkpoints)")
    add("--save-hf", metavar="DIR", help="write the trained model here at the end, as a Hugging Face directory")
    add("--overwrite", action="store_true", help="replace the run that --output-dir holds")
    add("--save-interval", type=int, metavar="N", help="rollouts between checkpoints (default: only at the end and on Ctrl-C)")
    add("--load", metavar="DIR", help="continue from the newest checkpoint there")
    add(
        "--eval-interval",
        type=int,
        default=10,
        metavar="N",
        help="rollouts between evaluations; 0 is never (default: %(default)s)",
    )
    add("--use-tensorboard", action="store_true", help="also write TensorBoard events")
    add("--custom-config-path", metavar="FILE", help="YAML of flags that override the command line")
    add(
        "--compare", metavar="ARMS",
        help="train several arms over the same seeds and draw them together, e.g. policy_loss,tis,mis,score_centering,"
        "score_centering+tis,score_centering@32 (@K: candidates)",
    )  # fmt: skip
    add("--compare-seeds", type=int, default=1, metavar="N", help="seeds per arm of --compare (default: %(default)s)")


def finish_train_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Applies ``--custom-config-path`` to what ``parser`` has parsed, then checks the result as a whole.

    Raises:
        ValueError: a flag's value or combination; flag, value and remedy are named.
    """
    if args.custom_config_path:
        _apply_config_file(args, parser)
    validate_train_arguments(args)


def _apply_config_file(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    import yaml

    path = Path(args.custom_config_path)
    try:
        overrides = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--custom-config-path {path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(overrides, dict):
        raise ValueError(f"--custom-config-path {path}: give a mapping of flags to values")
    actions = {action.dest: action for action in parser._actions}
    for key, value in overrides.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name not in actions or name in ("help", "custom_config_path"):
            close = difflib.get_close_matches(name, actions, n=1)
            raise ValueError(f"--custom-config-path {path}: {key} is no flag" + (f"; did you mean {close[0]}?" if close else ""))
        setattr(args, name, _checked(actions[name], value, f"--custom-config-path {path}: {key}"))


def _checked(action: argparse.Action, value: Any, where: str) -> Any:
    """A YAML value held to what argparse would have asked of the flag."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{where} = {value!r}: give true or false")
        return value
    if isinstance(action, argparse._AppendAction) or action.nargs == "+":
        if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise ValueError(f"{where} = {value!r}: give a list of texts")
        return value
    if value is None:
        if action.required:
            raise ValueError(f"{where} is empty: the flag is required; give a value")
        return action.default
    kind = action.type or str
    numeric = kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool)
    if not (numeric or (kind is str and isinstance(value, str))) or (kind is int and value % 1 != 0) or value != value:
        # PyYAML reads an exponent only after a dot
        wanted = {int: "a whole number", float: "a number, with a dot before an exponent (1.0e-6)"}.get(kind, "a text")
        raise ValueError(f"{where} = {value!r}: give {wanted}")
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{where} = {value!r}: choose one of {', '.join(map(str, action.choices))}")
    return kind(value)


def loss_settings(args: argparse.Namespace, *, vocab_size: int, tensor_group: ProcessGroup | None = None) -> LossSettings:
    """The loss's view of the flags."""
    return LossSettings(
        score_centering=ScoreCenteringConfig.from_args(args),
        observe=args.score_centering_observe,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        use_tis=args.use_tis,
        tis_mode=args.tis_mode,
        tis_clip=args.tis_clip,
        tis_clip_low=args.tis_clip_low,
        entropy_coef=args.entropy_coef,
        observe_entropy=args.observe_training_entropy,
        use_kl_loss=args.use_kl_loss,
        kl_loss_coef=args.kl_loss_coef,
        kl_loss_type=args.kl_loss_type,
        use_unbiased_kl=args.use_unbiased_kl,
        log_probs_chunk_size=args.log_probs_chunk_size,
        # a loss that runs again in backward needs the logits as they were
        inplace_backward=not args.recompute_loss_function,
        vocab_size=vocab_size,
        tensor_parallel_group=tensor_group,
    )


def optimizer_settings(args: argparse.Namespace) -> OptimizerSettings:
    """The optimizer's view of the flags."""
    return OptimizerSettings(**{name: getattr(args, name) for name in OptimizerSettings.__dataclass_fields__})
