"""The flags of score centering, the start-up contract they must satisfy, and the config built from them once."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_sc.loss.score_centering.importance_sampling import MODES

LOSS_TYPE = "score_centering"
LARGEST_FLOAT = 3e38  # what float32 tensors can be compared with
ORIGINAL_LOGPROB_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"


@dataclass(frozen=True)
class ScoreCenteringConfig:
    """What the loss and the rollout side need to know, built once from a namespace.

    Attributes:
        top_logprobs_num: K, candidates recorded per generated token; 0 is off.
        importance_sampling: weight function f: ``none``, ``tis`` or ``mis``.
        tis_clip: cap of a truncated weight.
        mis_low, mis_high: inclusive band of a masked weight.
        temperature, top_p, top_k: the sampler; ``top_k = -1`` is unfiltered.
    """

    top_logprobs_num: int = 0
    importance_sampling: str = "none"
    tis_clip: float = 2.0
    mis_low: float = 0.5
    mis_high: float = 5.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        _check_integer("--rollout-top-logprobs-num", self.top_logprobs_num, minimum=0)
        if self.importance_sampling not in MODES:
            raise ValueError(f"--score-centering-is {self.importance_sampling}: choose one of {', '.join(MODES)}")
        if not _is_positive(self.tis_clip):
            raise ValueError(f"--score-centering-tis-clip {self.tis_clip}: set a finite number above 0, e.g. 2.0")
        if not (_is_positive(self.mis_low) and _is_positive(self.mis_high) and self.mis_low <= self.mis_high):
            raise ValueError(
                f"--score-centering-mis-low {self.mis_low} --score-centering-mis-high {self.mis_high}: "
                "set finite numbers with 0 < low <= high, e.g. 0.5 and 5.0"
            )
        if not _is_positive(self.temperature):
            raise ValueError(
                f"--rollout-temperature {self.temperature}: set a finite number above 0 (greedy cannot be trained on)"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"--rollout-top-p {self.top_p}: set a number in (0, 1]")
        _check_integer("--rollout-top-k", self.top_k, minimum=-1)
        if self.top_k == 0:
            raise ValueError("--rollout-top-k 0: set -1 for no limit, or a positive count")
        if self.top_p < 1 and self.top_k < 1:
            raise ValueError(
                f"--rollout-top-p {self.top_p} without --rollout-top-k: the support that is recorded needs a bound; "
                "set a positive --rollout-top-k, e.g. 64"
            )
        if self.mode == "support" and 0 < self.top_logprobs_num < self.top_k:
            raise ValueError(
                f"--rollout-top-logprobs-num {self.top_logprobs_num} is smaller than --rollout-top-k {self.top_k}: "
                f"the whole support is recorded, so set --rollout-top-logprobs-num to at least {self.top_k}"
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ScoreCenteringConfig":
        """Reads a namespace that holds the flags of :func:`add_score_centering_arguments` and the sampler's.

        Raises:
            ValueError: a value out of range; the flag, the value and the remedy are named.
        """
        return cls(
            top_logprobs_num=getattr(args, "rollout_top_logprobs_num", 0),
            importance_sampling=getattr(args, "score_centering_is", "none"),
            tis_clip=getattr(args, "score_centering_tis_clip", 2.0),
            mis_low=getattr(args, "score_centering_mis_low", 0.5),
            mis_high=getattr(args, "score_centering_mis_high", 5.0),
            temperature=getattr(args, "rollout_temperature", 1.0),
            top_p=getattr(args, "rollout_top_p", 1.0),
            top_k=getattr(args, "rollout_top_k", -1),
        )

    @property
    def mode(self) -> str:
        """``support`` where sampling is filtered (its support is replayed in training), else ``selected``."""
        return "support" if self.top_p < 1 or self.top_k > 0 else "selected"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses a K that the model cannot give; a real SGLang server dies on such a request."""
        if self.mode == "selected" and self.top_logprobs_num > vocab_size:
            raise ValueError(
                f"--rollout-top-logprobs-num {self.top_logprobs_num} exceeds the model's vocabulary of {vocab_size}: "
                f"set it to at most {vocab_size}"
            )


def add_score_centering_arguments(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """The flags that users of the feature already know; the sampler's own flags are the host's."""
    parser.add_argument(
        "--rollout-top-logprobs-num", type=int, default=0, metavar="K",
        help="candidates recorded per generated token; 0 is off (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--score-centering-is", choices=MODES, default="none",
        help="importance weight inside the centred score: none, truncated or masked (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--score-centering-tis-clip",
        type=float,
        default=2.0,
        metavar="C",
        help="cap of a truncated weight (default: %(default)s)",
    )
    parser.add_argument(
        "--score-centering-mis-low", type=float, default=0.5, metavar="R",
        help="lowest ratio that a masked weight keeps, inclusive (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--score-centering-mis-high", type=float, default=5.0, metavar="R",
        help="highest ratio that a masked weight keeps, inclusive (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--score-centering-observe", action="store_true",
        help="log the drift metrics beside another loss, whose value and gradient stay bit-identical",
    )  # fmt: skip


# What does not go together with the loss: attribute, flag, why, remedy. A rule that we come to support leaves with its test.
_CONFLICTS = (
    ("use_tis", "--use-tis", "the weight must be centred together with the score", "use --score-centering-is tis instead"),
    ("custom_tis_function_path", "--custom-tis-function-path", "a foreign weight cannot be centred", "use --score-centering-is"),
    ("use_opsm", "--use-opsm", "a sequence mask is not a function of the token's ratio", "leave it out"),
    ("true_on_policy_mode", "--true-on-policy-mode", "there is no drift to centre then", "leave one of the two out"),
    (
        "recompute_logprobs_via_prefill", "--recompute-logprobs-via-prefill",
        "recomputed log-probs are not the sampler's", "leave it out",
    ),
    ("use_opd", "--use-opd", "distillation claims the same top-k log-probs", "leave it out"),
    ("multi_lora", "--multi-lora-n-adapters", "adapters have losses of their own", "leave it out"),
    (
        "custom_pg_loss_reducer_function_path", "--custom-pg-loss-reducer-function-path",
        "the loss has its own reduction", "leave it out",
    ),
    (
        "custom_convert_samples_to_train_data_path", "--custom-convert-samples-to-train-data-path",
        "a foreign converter drops the candidates", "leave it out",
    ),
    (
        "sglang_speculative_algorithm", "--sglang-speculative-algorithm",
        "speculative decoding reports other log-probs than it samples from", "leave it out",
    ),
)  # fmt: skip


def validate_score_centering_arguments(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> None:
    """The start-up contract. Runs after every config override, so that a YAML file cannot slip past it.

    Args:
        args: a host's or our namespace; an attribute that it lacks is a feature that it lacks.
        environment: the launching process's, whose log-prob flag the engines would inherit.

    Raises:
        ValueError: the flag, its value and what to set.
    """
    centered = getattr(args, "loss_type", "policy_loss") == LOSS_TYPE
    observed = getattr(args, "score_centering_observe", False)
    if not (centered or observed or getattr(args, "rollout_top_logprobs_num", 0)):
        return  # off: how a host samples then is its own affair
    config = ScoreCenteringConfig.from_args(args)
    if not (centered or observed):
        return
    name = f"--loss-type {LOSS_TYPE}" if centered else "--score-centering-observe"
    if config.top_logprobs_num == 0:
        raise ValueError(f"{name} with --rollout-top-logprobs-num 0: set the number of candidates to record, e.g. 128")
    if environment.get(ORIGINAL_LOGPROB_VARIABLE, "").strip().lower() in ("1", "true", "yes", "y", "on", "t"):
        raise ValueError(
            f"{ORIGINAL_LOGPROB_VARIABLE}={environment[ORIGINAL_LOGPROB_VARIABLE]} in the environment: log-probs would lose "
            "the temperature; unset it or set it to 0"
        )
    if not centered:
        return
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator != "grpo":
        raise ValueError(f"--advantage-estimator {estimator} with {name}: only grpo is supported; set --advantage-estimator grpo")
    for attribute, flag, why, remedy in _CONFLICTS:
        value = getattr(args, attribute, None)
        if value:
            raise ValueError(f"{flag} (= {value}) with {name}: {why}; {remedy}")


def score_centering_settings(config: ScoreCenteringConfig) -> dict[str, Any]:
    """The keyword arguments of :func:`miles_sc.score_centering_loss` in a config."""
    return {name: getattr(config, name) for name in ("importance_sampling", "tis_clip", "mis_low", "mis_high")}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_FLOAT


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0


def _check_integer(flag: str, value: object, *, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{flag} {value}: set a whole number of at least {minimum}")
