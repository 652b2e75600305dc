"""Why an answer cannot be read: what a known bad layer has done to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.probe.asker import quoted

OPENAI_LIMIT = 20
BYPASS = "send these calls to the engine itself, or through a layer that passes"

# mode -> the checks of what was recorded: its amount, its rows, its numbers
CHECKS = {"selected": ("candidates", "rows", "numbers"), "support": ("support", "support rows", "support numbers")}


@dataclass(frozen=True)
class Diagnosis:
    """The check that failed, what came and the remedy."""

    check: str
    came: str
    remedy: str


def diagnose(meta_info: Mapping[str, Any], config: ScoreCenteringConfig, error: ValueError) -> Diagnosis:
    """Tells a known cause by what is left of the answer.

    Args:
        error: what reading ``meta_info`` has raised; quoted where the cause is none of the known ones.
    """
    amount, rows, numbers = CHECKS[config.mode]
    sampled, counts = meta_info.get("output_token_logprobs"), _counts(meta_info, config.mode)
    if not isinstance(sampled, Sequence):
        return Diagnosis(amount, "no output_token_logprobs", f"{BYPASS} return_logprob (on chat logprobs and return_meta_info)")
    if counts is None:
        asked = {
            "selected": "top_logprobs_num (on chat top_logprobs)",
            "support": "return_sampling_mask and sampling_logprobs_mode",
        }
        return Diagnosis(amount, f"none on {len(sampled)} tokens", f"{BYPASS} {asked[config.mode]}")
    if any(count != len(sampled) for count in (len(counts), meta_info.get("completion_tokens", len(counts)))):
        return Diagnosis(rows, quoted(error), "something on the way cuts or repeats rows: ask the engine itself and compare")
    if config.mode == "selected" and counts and min(counts) < config.top_logprobs_num:
        return _too_few(amount, counts, config.top_logprobs_num)
    if config.mode == "support" and _holds_numbers(meta_info.get("output_token_sampling_logprobs")):
        return Diagnosis(numbers, "log-probs of the sampled tokens alone", f"{BYPASS} sampling_logprobs_mode")
    return Diagnosis(numbers, quoted(error), "something on the way changes them: ask the engine itself and compare")


def _too_few(check: str, counts: Sequence[int], k: int) -> Diagnosis:
    fewest, most = min(counts), max(counts)
    if fewest == most > 0:
        limit = ", the OpenAI API's limit" if most == OPENAI_LIMIT else ""
        remedy = f"{BYPASS} more than {most}{limit}; or set --rollout-top-logprobs-num {most}"
        return Diagnosis(check, f"{most} of {k} on every token", remedy)
    return Diagnosis(
        check, f"{fewest} to {most} of {k}, not the same number on every token",
        "candidates were merged by their text (SGLang 0.5.16's chat does so): update what answers, or use the native route",
    )  # fmt: skip


def _counts(meta_info: Mapping[str, Any], mode: str) -> list[int] | None:
    """Candidates on each token, 0 where they cannot be counted; None where the field is missing."""
    shape = meta_info.get("output_top_logprobs_shape") if mode == "selected" else None
    if shape is not None:
        well_formed = isinstance(shape, Sequence) and len(shape) == 2 and all(isinstance(size, int) for size in shape)
        return [shape[1]] * shape[0] if well_formed else [0]
    table = meta_info.get("output_top_logprobs" if mode == "selected" else "output_token_sampling_mask")
    if table is None:
        return None
    return [len(row) if isinstance(row, Sequence) else 0 for row in table] if isinstance(table, Sequence) else [0]


def _holds_numbers(table: Any) -> bool:
    return isinstance(table, Sequence) and any(isinstance(row, int | float) for row in table)
