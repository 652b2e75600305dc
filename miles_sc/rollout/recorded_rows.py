"""The rows that recording adds to a response, on any sample: ours or a host's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_sc.candidates import Candidates
from miles_sc.rollout.answer import GeneratedTokens
from miles_sc.sampling_support import SamplingSupport

FIELDS = ("rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_sampling_mask")


@dataclass(frozen=True)
class RecordedRows:
    """One row per response token.

    Attributes:
        candidates: ``[R, K]``.
        support: R rows under filtered sampling, else None.
    """

    candidates: Candidates
    support: SamplingSupport | None = None

    def __len__(self) -> int:
        return len(self.candidates)

    @classmethod
    def of(cls, sample: Any, *, where: str = "the sample") -> "RecordedRows | None":
        """A sample's; None where nothing was recorded.

        Raises:
            ValueError: arrays of another kind, or some of them alone.
        """
        ids, log_probs, support = (getattr(sample, name, None) for name in FIELDS)
        if ids is None and log_probs is None and support is None:
            return None
        try:
            return cls(Candidates(ids, log_probs), support)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def put(self, sample: Any) -> None:
        """Makes them a sample's."""
        sample.rollout_topk_token_ids, sample.rollout_topk_log_probs = self.candidates.token_ids, self.candidates.log_probs
        sample.rollout_sampling_mask = self.support

    def append_observation(self, token_ids: Sequence[int]) -> "RecordedRows":
        """With gap rows for tokens that nobody sampled; their support is the token itself."""
        support = self.support
        if support is not None:
            support = SamplingSupport.concatenate([support, SamplingSupport.singletons(token_ids)])
        return RecordedRows(self.candidates.append_gap(len(token_ids)), support)

    def trim(self, rows: int) -> "RecordedRows":
        """Without the last ``rows`` rows; views, no copy."""
        return RecordedRows(self.candidates.trim(rows), None if self.support is None else self.support.trim(rows))

    @classmethod
    def concatenate(cls, parts: "Sequence[RecordedRows]") -> "RecordedRows":
        """One after the other; all filtered or none, and all of the same K."""
        supports = [part.support for part in parts]
        if any(support is None for support in supports) and any(support is not None for support in supports):
            raise ValueError("recorded rows with and without a sampling support cannot be joined: one run, one kind of sampling")
        return cls(
            Candidates.concatenate([part.candidates for part in parts]),
            None if supports[0] is None else SamplingSupport.concatenate(supports),
        )


def extended_rows(sample: Any, generated: GeneratedTokens) -> RecordedRows:
    """A sample's rows with those of one more call behind them; the sample is not touched.

    Raises:
        ValueError: earlier response tokens without a row of the same K and the same kind of sampling.
    """
    added = RecordedRows(generated.candidates, generated.support)
    before = RecordedRows.of(sample)
    if before is None:
        if sample.response_length:
            raise ValueError(f"the sample has {sample.response_length} response tokens without candidates: every one needs a row")
        return added
    k = added.candidates.k
    if len(before) != sample.response_length or before.candidates.k != k:
        raise ValueError(
            f"the sample holds candidates {before.candidates.token_ids.shape} for {sample.response_length} response tokens and "
            f"k = {k}: every response token needs one row of k"
        )
    if before.support is None and added.support is not None and len(before):
        raise ValueError("the sample's earlier tokens lack their sampling support: one run, one kind of sampling")
    if before.support is not None and added.support is None and len(before):
        raise ValueError("the sample holds a sampling support and this call was unfiltered: one run, one kind of sampling")
    return RecordedRows.concatenate([before, added]) if len(before) else added
