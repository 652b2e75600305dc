"""A host's command line: our flags in its parser, our start-up contract behind its validation."""

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles_sc import __version__
from miles_sc.arguments import add_score_centering_arguments, validate_score_centering_arguments
from miles_sc.config import LOSS_TYPE, ScoreCenteringConfig
from miles_sc.hosts.activation import Activation, required
from miles_sc.hosts.run import PROVIDER, bound, is_asked_for, is_centered, is_observed, producer_vocabulary

logger = logging.getLogger(__name__)


def add_flags(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Around the function that returns the host's provider of arguments.

    The flags must be there before the provider runs: inside, a host parses the command line once more for the functions that a
    user names, and takes a failure of that parse for "there are none".
    """
    provide = wrapped(*args, **kwargs)

    def provide_with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_score_centering_arguments(parser.add_argument_group("score centering"))
        with _one_more_choice(parser, "--loss-type", LOSS_TYPE):
            return provide(parser)

    return provide_with_ours


def add_provider_flag(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same on a host that has the other flags: which of the two losses trains."""
    provide = wrapped(*args, **kwargs)

    def provide_with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument(
            "--score-centering-provider", choices=("host", "miles_sc"), default="host",
            help="whose score_centering loss trains (default: %(default)s)",
        )  # fmt: skip
        return provide(parser)

    return provide_with_ours


@contextmanager
def _one_more_choice(parser: argparse.ArgumentParser, flag: str, choice: str) -> Iterator[None]:
    add_argument = parser.add_argument

    def widened(*names: str, **options: Any) -> argparse.Action:
        if flag in names:
            options["choices"] = [*options["choices"], choice]
        return add_argument(*names, **options)

    parser.add_argument = widened
    try:
        yield
    finally:
        del parser.add_argument


def validate(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Behind the host's own validation, which is where a configuration file overrides the command line."""
    result = wrapped(*args, **kwargs)
    check_run(bound(wrapped, args, kwargs)["args"], package=wrapped.__module__.split(".")[0])
    return result


def check_run(run: argparse.Namespace, *, package: str) -> None:
    """The start-up contract inside a host.

    Raises:
        ValueError: the flag, its value and what to set; or a host whose seams are not as this plugin knows them.
    """
    _refuse_unknown_names(run)
    if not (is_centered(run) or is_observed(run)):
        _refuse_idle_flags(run)
    if not is_asked_for(run):
        return
    active = required(package)
    validate_score_centering_arguments(run)
    config = ScoreCenteringConfig.from_args(run)
    _refuse_another_count(run, config)
    if (vocab_size := producer_vocabulary(run)) is not None:
        config.check_vocabulary(vocab_size)
    if config.mode == "support":
        _check_support_is_reported(run, config)
    _say_what_is_on(run, config, active)


def _refuse_another_count(run: argparse.Namespace, config: ScoreCenteringConfig) -> None:
    if config.top_logprobs_num and getattr(run, "use_opd", False) and getattr(run, "opd_log_prob_top_k", 0):
        raise ValueError(
            f"--opd-log-prob-top-k {run.opd_log_prob_top_k} with --rollout-top-logprobs-num {config.top_logprobs_num}: both ask "
            "the engine for its top log-probs, and one call brings one count; leave one of the two out"
        )


def _say_what_is_on(run: argparse.Namespace, config: ScoreCenteringConfig, active: Activation) -> None:
    logger.info(
        "miles_sc %s has entered %s (%s): --loss-type %s%s, %d candidates per token, importance weights %s",
        __version__, active.host.package, active.version, run.loss_type, ", observed" if is_observed(run) else "",
        config.top_logprobs_num, config.importance_sampling,
    )  # fmt: skip
    if not (is_centered(run) or is_observed(run)):
        logger.warning(
            "--rollout-top-logprobs-num %d with --loss-type %s: candidates are recorded and no loss reads them; add --loss-type "
            "%s or --score-centering-observe, unless this run only records", config.top_logprobs_num, run.loss_type, LOSS_TYPE,
        )  # fmt: skip
    if getattr(run, "train_backend", None) == "fsdp" and getattr(run, "calculate_per_token_loss", False):
        logger.warning(
            "--calculate-per-token-loss with --train-backend fsdp: this host does not divide such a loss by its tokens there, "
            "whatever the loss; leave the flag out"
        )


def check_takeover(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On a host with a score centering of its own: whose trains is said, and ours only where it is asked for."""
    result = wrapped(*args, **kwargs)
    run = bound(wrapped, args, kwargs)["args"]
    if not is_centered(run):
        return result
    provider = getattr(run, PROVIDER, "host")
    if provider not in ("host", "miles_sc"):  # a configuration file passes by argparse
        raise ValueError(f"--score-centering-provider {provider}: choose host or miles_sc")
    if provider == "host":
        logger.info(
            "this host has a score_centering loss of its own, which trains; --score-centering-provider miles_sc takes it over"
        )
        return result
    required(wrapped.__module__.split(".")[0])
    validate_score_centering_arguments(run)
    logger.info("score_centering is trained by miles_sc (--score-centering-provider)")
    return result


def _our_defaults() -> dict[str, Any]:
    ours = argparse.ArgumentParser()
    add_score_centering_arguments(ours)
    return vars(ours.parse_args([]))


def _refuse_unknown_names(run: argparse.Namespace) -> None:
    """A configuration file sets whatever it names, of whatever type."""
    known = _our_defaults()
    for name, value in vars(run).items():
        meant = name.replace("-", "_")
        if name not in known and (meant in known or meant == "score_centering" or meant.startswith("score_centering_")):
            raise ValueError(f"{name} = {value!r}: nothing reads it; the names in a configuration file are {', '.join(known)}")
        if isinstance(known.get(name), bool) and not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r}: set true or false")


def _refuse_idle_flags(run: argparse.Namespace) -> None:
    for name, default in _our_defaults().items():
        if name.startswith("score_centering_") and getattr(run, name, default) != default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {getattr(run, name)} with --loss-type {getattr(run, 'loss_type', None)}: nothing would read it; "
                f"set --loss-type {LOSS_TYPE} or --score-centering-observe, or leave it out"
            )


def _check_support_is_reported(run: argparse.Namespace, config: ScoreCenteringConfig) -> None:
    """SGLang reports a support up to a size that its servers are started with."""
    if getattr(run, "rollout_external", False):
        return  # those are asked once they are there
    filters = f"--rollout-top-p {config.top_p} --rollout-top-k {config.top_k}"
    limit = getattr(run, "sglang_sampling_mask_max_tokens", None)
    if limit is None:
        raise ValueError(
            f"{filters}: this host's SGLang has no --sampling-mask-max-tokens, so it cannot report the support of filtered "
            "sampling; sample unfiltered (--rollout-top-p 1.0 --rollout-top-k -1), or use SGLang 0.5.23 or newer"
        )
    if limit < config.top_k:
        raise ValueError(
            f"{filters} with --sglang-sampling-mask-max-tokens {limit}: the engines report no support of that size; "
            f"set --sglang-sampling-mask-max-tokens to at least {config.top_k}"
        )
