"""The flags of score centering and the start-up contract they must satisfy."""

import argparse
import os
from collections.abc import Mapping

from miles_sc.config import LOSS_TYPE, ScoreCenteringConfig
from miles_sc.loss.score_centering.importance_sampling import MODES

ORIGINAL_LOGPROB_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"


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
