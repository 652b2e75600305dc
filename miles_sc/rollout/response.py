"""What one call generated, appended to a Sample: ours or a host's, all or nothing."""

from collections.abc import Mapping
from typing import Any

from miles_sc.rollout.answer import GeneratedTokens, read_generated_tokens
from miles_sc.rollout.recorded_rows import extended_rows


def append_candidates(
    sample: Any, meta_info: Mapping[str, Any], *, k: int, mode: str = "selected", vocab_size: int | None = None
) -> None:
    """Extends a sample by what one call generated, all or nothing.

    Args:
        sample: ours or a host's; ``tokens``, ``response_length``, ``loss_mask``, ``rollout_log_probs``, the candidate arrays
            and ``rollout_sampling_mask`` are extended, nothing else is read or written.
        meta_info: the answer's, native or a chat choice's.
        k: candidates asked for, the width of the arrays.
        mode: ``selected`` (top k of the whole vocabulary) or ``support`` (everything filtered sampling could draw).
        vocab_size: the producer's; bounds the ids, and the rows where it is smaller than k.

    Raises:
        ValueError: anything missing, short, long, misaligned or not a distribution; the sample is then as it was.
    """
    if k < 1:
        raise ValueError(f"k = {k}: ask for at least one candidate")
    append_generated_tokens(sample, read_generated_tokens(meta_info, k=k, mode=mode, vocab_size=vocab_size))


def append_generated_tokens(sample: Any, generated: GeneratedTokens) -> None:
    """The same for an answer that has been read; one without candidates extends tokens, log-probs and loss mask alone.

    Raises:
        ValueError: the sample's earlier rows do not fit; the sample is then as it was.
    """
    log_probs, loss_mask = _aligned_scalars(sample)
    if generated.candidates is not None:
        extended_rows(sample, generated).put(sample)
    sample.rollout_log_probs = log_probs + generated.log_probs.tolist()
    sample.loss_mask = loss_mask + [1] * len(generated)
    sample.tokens = list(sample.tokens) + generated.token_ids.tolist()
    sample.response_length += len(generated)


def _aligned_scalars(sample: Any) -> tuple[list[float], list[int]]:
    """Copies of the sample's log-probs and loss mask so far, one entry per response token."""
    log_probs = list(sample.rollout_log_probs or ())
    loss_mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
    for name, value in (("rollout_log_probs", log_probs), ("loss_mask", loss_mask)):
        if len(value) != sample.response_length:
            raise ValueError(
                f"{name} has {len(value)} entries for a response of {sample.response_length} tokens: the sample is misaligned"
            )
    return log_probs, loss_mask
