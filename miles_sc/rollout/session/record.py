"""One turn as it is kept: the exact prompt and what the engine generated after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer import GeneratedTokens, check_likeliest, read_generated_tokens

_REFERENCE_BYTES = 8  # of a list's entry


@dataclass(frozen=True)
class RecordedTurn:
    """One call.

    Attributes:
        arrival: how many calls of the session came before it.
        prompt_ids: int32 ``[P]``, what the engine saw.
        generated: what it answered, validated.
        droppable: how many of the last generated tokens a chat template may leave out when it renders the turn into the next
            prompt: the stop, and white space before it.
        stop_token: the last generated token, where the engine says that it ended the answer.
    """

    arrival: int
    prompt_ids: np.ndarray
    generated: GeneratedTokens
    droppable: int
    stop_token: int | None

    @property
    def token_ids(self) -> np.ndarray:
        """int64 ``[P + n]``, prompt and answer."""
        return np.concatenate([self.prompt_ids, self.generated.token_ids])

    @property
    def nbytes(self) -> int:
        """Of the arrays that it keeps."""
        arrays = [self.prompt_ids, self.generated.token_ids, self.generated.log_probs]
        if self.generated.candidates is not None:
            arrays += [self.generated.candidates.token_ids, self.generated.candidates.log_probs]
        if self.generated.support is not None:
            arrays += [self.generated.support.ids, self.generated.support.offsets]
        return sum(array.nbytes for array in arrays) + _REFERENCE_BYTES * len(self.generated.weight_versions)


def read_turn(answer: Mapping[str, Any], config: ScoreCenteringConfig, *, vocab_size: int | None, arrival: int) -> RecordedTurn:
    """What a chat completion recorded.

    Args:
        answer: the engine's, to a request of `engine_request`.
        vocab_size: the engine's.

    Raises:
        ValueError: anything missing, or not what was asked for; such a turn cannot be trained on.
    """
    choices = answer.get("choices")
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        came = len(choices) if isinstance(choices, list) else choices
        raise ValueError(f"choices: {came!r} came and exactly one was asked for; is the engine's route /v1/chat/completions?")
    meta_info = choices[0].get("meta_info")
    if not isinstance(meta_info, dict):
        raise ValueError(
            "meta_info is missing from the answer: the engine, or a router before it, does not know return_meta_info on chat; "
            "ask the engine directly or update that layer"
        )
    generated = read_generated_tokens(meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=vocab_size)
    check_likeliest(generated)
    if generated.finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason = {meta_info.get('finish_reason')!r}: only stop, length and abort are understood")
    matched = meta_info["finish_reason"].get("matched") if isinstance(meta_info["finish_reason"], dict) else None
    if isinstance(matched, int) and generated.token_ids[-1:].tolist() != [matched]:
        matched = None
    return RecordedTurn(
        arrival=arrival,
        prompt_ids=_prompt_ids(choices[0], vocab_size),
        generated=generated,
        droppable=_droppable(meta_info, matched),
        stop_token=matched if isinstance(matched, int) else None,
    )


def _prompt_ids(choice: Mapping[str, Any], vocab_size: int | None) -> np.ndarray:
    field = "prompt_token_ids"
    ids = choice.get(field)
    if ids is None:
        raise ValueError(
            f"{field} is missing from the answer: the engine, or a router before it, does not know return_prompt_token_ids on "
            "chat (SGLang 0.5.23 does); without them it is not known which tokens the turn continued"
        )
    array = np.array(ids) if isinstance(ids, list) and ids else np.empty(0)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError(f"{field} = {str(ids)[:80]}: wanted a list of token ids, at least one")
    outside = (array < 0) | (array > (np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1))
    if outside.any():
        at = int(np.argmax(outside))
        raise ValueError(f"{field}, position {at}: token {array[at]} is outside the vocabulary of {vocab_size}")
    return array.astype(np.int32)


def _droppable(meta_info: Mapping[str, Any], matched: int | str | None) -> int:
    texts = [entry[2] if len(entry) > 2 else None for entry in meta_info.get("output_token_logprobs") or ()]
    count = _stop_length(matched, texts)
    while count < len(texts) and isinstance(text := texts[-1 - count], str) and text.isspace():
        count += 1
    return count


def _stop_length(matched: int | str | None, texts: Sequence[str | None]) -> int:
    """How many of the last tokens make up the stop: one token, or a stop string's."""
    if isinstance(matched, int):
        return 1
    if isinstance(matched, str) and matched:
        tail = ""
        for count, text in enumerate(reversed(texts), start=1):
            tail = (text or "") + tail
            if matched in tail:
                return count
    return 0
