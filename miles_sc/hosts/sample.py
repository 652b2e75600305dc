"""A host's Sample: the recorded rows go through its life with it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from miles_sc.hosts.run import bound
from miles_sc.rollout.recorded_rows import FIELDS, RecordedRows


def with_recorded_fields(sample_class: type) -> type:
    """The host's class with a default for our fields, so that a sample without them reads as one."""
    for name in FIELDS:
        setattr(sample_class, name, None)
    return sample_class


def validate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``Sample.validate``.

    Raises:
        ValueError: recorded rows that are not one per response token.
    """
    result = wrapped(*args, **kwargs)
    if (rows := RecordedRows.of(instance)) is not None:
        check_aligned(instance, rows)
    return result


def check_aligned(sample: Any, rows: RecordedRows) -> None:
    """One row per response token, in every field.

    Raises:
        ValueError: the field and both lengths.
    """
    for name, value in (("rollout_topk_token_ids", rows.candidates), ("rollout_sampling_mask", rows.support)):
        if value is not None and len(value) != sample.response_length:
            raise ValueError(
                f"sample {sample.index}: {name} has {len(value)} rows for a response of {sample.response_length} tokens; every "
                "response token needs exactly one"
            )


def strip_last_output_tokens(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``Sample.strip_last_output_tokens(n, tokenizer)``."""
    before = instance.response_length
    result = wrapped(*args, **kwargs)
    if (rows := RecordedRows.of(instance)) is not None:
        rows.trim(before - instance.response_length).put(instance)
    return result


def reset_for_retry(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``Sample.reset_for_retry``."""
    result = wrapped(*args, **kwargs)
    _forget_rows(instance)
    return result


def tool_responses(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around the function that appends a tool's answer to a sample: nobody sampled it, so its rows are gaps."""
    return append_observation(bound(wrapped, args, kwargs)["sample"], partial(wrapped, *args, **kwargs))


def append_observation(sample: Any, append: Callable[[], Any]) -> Any:
    """Lets a host append tokens that nobody sampled, and gives them their gap rows."""
    rows, before = RecordedRows.of(sample), len(sample.tokens)
    result = append()
    if rows is not None:
        rows.append_observation(sample.tokens[before:]).put(sample)
    return result


def merge_pair(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around ``_merge_sample_pair(a, b, tokenizer)``, which builds its result from the fields that it knows.

    Raises:
        ValueError: one turn has recorded rows and the other has none.
    """
    call = bound(wrapped, args, kwargs)
    a, b, tokenizer = call["a"], call["b"], call["tokenizer"]
    earlier, later = RecordedRows.of(a), RecordedRows.of(b)
    if earlier is None and later is None:
        return wrapped(*args, **kwargs)
    if earlier is None or later is None:
        lacking, turn = ("first", a) if earlier is None else ("second", b)
        raise ValueError(
            f"sample {turn.index}: the {lacking} of two turns has no recorded candidates and the other has: all turns of a "
            "conversation need them"
        )
    for turn, rows in ((a, earlier), (b, later)):
        check_aligned(turn, rows)
    merged = wrapped(_without_rows(a), _without_rows(b), tokenizer)
    told = b.tokens[len(a.tokens) : len(b.tokens) - b.response_length]
    RecordedRows.concatenate([earlier.append_observation(told), later]).put(merged)
    return merged


def _without_rows(sample: Any) -> Any:
    """The host copies both turns deeply; it need not copy what it does not know."""
    bare = copy.copy(sample)
    _forget_rows(bare)
    return bare


def _forget_rows(sample: Any) -> None:
    for name in FIELDS:
        sample.__dict__.pop(name, None)
