"""Slime's rollout side: what it may be started with, what its engine is asked, its Sample, its manager's train data."""

import argparse
import os
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from miles_sc.arguments import ORIGINAL_LOGPROB_VARIABLE
from miles_sc.hosts import flags
from miles_sc.hosts.collection import EVALUATING, PendingRows, configured
from miles_sc.hosts.engines import examine_router
from miles_sc.hosts.run import bound, is_asked_for, recording
from miles_sc.hosts.sample import append_observation
from miles_sc.hosts.train_data import KEYS, recorded_columns, write_out_defaults
from miles_sc.rollout.answer_fields import CANDIDATE_FIELDS

STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"

# The run whose request Slime's own generate function is making; None in anybody else's, and while it evaluates.
_GENERATING: ContextVar[argparse.Namespace | None] = ContextVar("miles_sc_slime_generating", default=None)
# The train data that the manager is splitting.
_SPLITTING: ContextVar[Mapping[str, Any] | None] = ContextVar("miles_sc_slime_splitting", default=None)


# --- the command line


def validate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``slime_validate_args(args)``, which reads ``--custom-config-path`` near its end."""
    result = wrapped(*args, **kwargs)
    check_run(bound(wrapped, args, kwargs)["args"])
    return result


def role_arguments(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> argparse.Namespace:
    """Around ``parse_megatron_role_args(base_args, megatron_config_path, role)``: one more file that overrides flags."""
    run = wrapped(*args, **kwargs)
    if bound(wrapped, args, kwargs)["role"] == "actor":
        check_run(run)
    return run


def check_run(run: argparse.Namespace) -> None:
    """The start-up contract, after what Slime alone cannot do.

    Raises:
        ValueError: the flag, its value and what to set.
    """
    if is_asked_for(run):
        _refuse_what_slime_cannot(run)
    flags.check_run(run, package="slime")


def _refuse_what_slime_cannot(run: argparse.Namespace) -> None:
    if run.rollout_top_p != 1.0:
        raise ValueError(
            f"--rollout-top-p {run.rollout_top_p}: Slime replays a nucleus of its own, from an SGLang of its own, and its "
            "converter demands it of every sample; set --rollout-top-p 1.0"
        )
    if run.custom_generate_function_path == STREAMING:
        raise ValueError(
            f"--custom-generate-function-path {STREAMING}: each chunk of a stream repeats all candidates so far, a traffic that "
            "grows with the square of the response; leave it out, Slime's own generate function brings the same samples"
        )


# --- the engines


def start_engine(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``SGLangEngine.init(...)``, which starts a server that inherits this actor's environment."""
    if recording(instance.args) is not None:
        os.environ[ORIGINAL_LOGPROB_VARIABLE] = "0"
    return wrapped(*args, **kwargs)


# --- one generation


async def generate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``generate(args, sample, sampling_params)``."""
    run = bound(wrapped, args, kwargs)["args"]
    token = _GENERATING.set(None if recording(run) is None or EVALUATING.get() else run)
    try:
        return await wrapped(*args, **kwargs)
    finally:
        _GENERATING.reset(token)


async def post(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``post(url, payload, ...)`` where that function sees it."""
    run = _GENERATING.get()
    if run is None:
        return await wrapped(*args, **kwargs)
    asked = bound(wrapped, args, kwargs)
    return await wrapped(**{**asked, "payload": configured(run, recording(run), asked["payload"])})


def append_response_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``Sample.append_response_tokens(args, *, tokens, trainable, meta_info, ...)``, through which every response grows.

    Also in generate functions of a user's own: whoever asks for candidates and passes ``meta_info`` on has them recorded.

    Raises:
        ValueError: the answer's candidates are missing or broken; the sample is not touched.
    """
    if not kwargs.get("trainable", True):
        return append_observation(instance, partial(wrapped, *args, **kwargs))
    run = args[0] if args else kwargs.get("args")
    meta_info = kwargs.get("meta_info") or {}
    if not len(kwargs.get("tokens") or ()) or not _brings_rows(run, meta_info):
        return wrapped(*args, **kwargs)
    rows = PendingRows(run, recording(run), instance, meta_info)
    result = wrapped(*args, **kwargs)
    rows.put(instance)
    return result


def _brings_rows(run: argparse.Namespace | None, meta_info: Mapping[str, Any]) -> bool:
    """Whether an answer must have candidates, since we asked for them, or has some, since a user's own function did."""
    if run is None or recording(run) is None or EVALUATING.get():
        return False
    return _GENERATING.get() is not None or any(name.startswith(CANDIDATE_FIELDS) for name in meta_info)


# --- the manager: engines up, samples converted, train data split


class RecordingManager:
    """Goes before Slime's ``RolloutManager``, whose methods nobody can wrap: its module binds what Ray has made of the class."""

    def __init__(self, args: argparse.Namespace, pg: Any) -> None:
        super().__init__(args, pg)
        if self.rollout_engines:
            examine_router(args)

    def _convert_samples_to_train_data(self, samples: list[Any]) -> dict[str, Any]:
        write_out_defaults(self.args, samples)
        data = super()._convert_samples_to_train_data(samples)
        return data | recorded_columns(self.args, samples, data, package="slime")

    def _split_train_data_by_dp(self, data: dict[str, Any]) -> list[Any]:
        token = _SPLITTING.set(data)
        try:
            return super()._split_train_data_by_dp(data)
        finally:
            _SPLITTING.reset(token)


def recording_manager(known: Any) -> Any:
    """In place of the actor class ``RolloutManager``: the same with :class:`RecordingManager` before it."""
    import ray

    written = known.__ray_actor_class__
    names = {name: getattr(written, name) for name in ("__module__", "__qualname__", "__doc__")}
    return ray.remote(type(written.__name__, (RecordingManager, written), names))


def shard(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Around ``tensorize_rollout_data_for_training(rollout_data)``, the last that a shard passes before it is stored."""
    data, mine = _SPLITTING.get(), bound(wrapped, args, kwargs)["rollout_data"]
    if data is not None:
        mine.update({key: [data[key][i] for i in mine["partition"]] for key in KEYS if key in data})
    return wrapped(*args, **kwargs)
