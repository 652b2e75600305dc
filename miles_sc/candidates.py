"""The sampler's candidates of a response as one value: two aligned arrays, from collector to loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# How far a float32 log-prob may exceed 0, a row's mass exceed 1, and two reports of one number differ.
LOG_PROB_SLACK = 1e-6
MASS_SLACK = 1e-4
AGREEMENT = 1e-4
# What -inf becomes when it is clamped to float16; with float32 it is -3.4e38. No probability is that small.
MINUS_INFINITY = -65504.0


@dataclass(frozen=True)
class Candidates:
    """K candidates for each of R response tokens.

    Attributes:
        token_ids: int32 ``[R, K]``, -1 in unused slots.
        log_probs: float32 ``[R, K]``, -inf in unused slots.

    A row without any candidate is a gap: a token that nobody sampled (a tool's observation) or that is not trained.
    Arrays may be read-only views of shared memory; nothing here writes to them.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray

    def __post_init__(self) -> None:
        for name, array, dtype in (("token_ids", self.token_ids, np.int32), ("log_probs", self.log_probs, np.float32)):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 2:
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(f"candidate {name} are {got}: give a numpy {np.dtype(dtype).name} array [rows, K]")
        if self.token_ids.shape != self.log_probs.shape:
            raise ValueError(
                f"candidate token_ids {self.token_ids.shape} and log_probs {self.log_probs.shape}: their shapes must be equal"
            )

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def k(self) -> int:
        """Slots per row."""
        return self.token_ids.shape[1]

    @classmethod
    def gap(cls, rows: int, k: int) -> "Candidates":
        """``rows`` rows without a candidate."""
        return cls(np.full((rows, k), -1, np.int32), np.full((rows, k), -np.inf, np.float32))

    @classmethod
    def concatenate(cls, parts: "Sequence[Candidates]") -> "Candidates":
        """One after the other; all must have the same K."""
        widths = {part.k for part in parts}
        if len(widths) != 1:
            raise ValueError(f"candidates with K in {sorted(widths)} cannot be joined: every part needs the same K")
        if len(parts) == 1:
            return parts[0]
        return cls(np.concatenate([part.token_ids for part in parts]), np.concatenate([part.log_probs for part in parts]))

    def append_gap(self, rows: int) -> "Candidates":
        """With ``rows`` more rows that hold no candidate, e.g. for a tool's observation."""
        return Candidates.concatenate([self, Candidates.gap(rows, self.k)])

    def trim(self, rows: int) -> "Candidates":
        """Without the last ``rows`` rows; views, no copy."""
        if not 0 <= rows <= len(self):
            raise ValueError(f"trim({rows}) of candidates with {len(self)} rows: give 0..{len(self)}")
        kept = len(self) - rows
        return Candidates(self.token_ids[:kept], self.log_probs[:kept])

    def validate(
        self,
        *,
        vocab_size: int | None = None,
        sampled_token_ids: np.ndarray | None = None,
        sampled_log_probs: np.ndarray | None = None,
        complete: bool = False,
        trained: np.ndarray | None = None,
        where: str = "candidates",
    ) -> None:
        """Checks every row, vectorised.

        Args:
            vocab_size: ids must lie below it.
            sampled_token_ids, sampled_log_probs: ``[R]``; where the sampled token is among the candidates both reports of
                its log-prob must agree.
            complete: each non-gap row is the whole distribution, so its mass is 1 and holds the sampled token.
            trained: bool ``[R]``; a trained row must not be a gap, and only trained rows must agree with what was sampled.
            where: what to call this in an error.

        Raises:
            ValueError: the first broken row, its value and the remedy.
        """
        used = self.token_ids >= 0
        check = _RowCheck(where)
        check.each_slot(self.token_ids < -1, self.token_ids, "id {value}: ids are -1 (unused) or in the vocabulary")
        if vocab_size is not None:
            check.each_slot(
                self.token_ids >= vocab_size, self.token_ids, f"id {{value}} is outside the vocabulary of {vocab_size}: "
                "do sampler and trainer use one tokenizer?",
            )  # fmt: skip
        check.each_slot(
            used & ~(np.isfinite(self.log_probs) & (self.log_probs > MINUS_INFINITY)), self.log_probs,
            "log-prob {value}: a candidate's must be finite, and no number that stands for -inf",
        )  # fmt: skip
        check.each_slot(
            used & (self.log_probs > LOG_PROB_SLACK), self.log_probs, "log-prob {value} is above 0: these are not log-probs"
        )
        check.each_slot(
            ~used & (self.log_probs != -np.inf), self.log_probs, "log-prob {value} in an unused slot (id -1): it must be -inf"
        )
        check.each_row(self._repeats(), "an id stands twice: were candidates merged by token text?")
        mass = np.exp(np.where(used, self.log_probs, -np.inf), dtype=np.float64).sum(axis=1)
        check.each_row(mass > 1 + MASS_SLACK, "the candidates' mass {value:.6f} exceeds 1: these are not one distribution", mass)
        filled = used.any(axis=1)
        if complete:
            check.each_row(
                filled & (mass < 1 - MASS_SLACK), "the support's mass {value:.6f} is not 1: was it normalised after filtering?",
                mass,
            )  # fmt: skip
        if trained is not None:
            check.each_row(
                trained & ~filled, "no candidate on a trained token: its producer must record the sampler's candidates"
            )
        if sampled_token_ids is not None:
            self._check_sampled(check, sampled_token_ids, sampled_log_probs, filled, complete, trained)

    def _repeats(self) -> np.ndarray:
        in_order = np.sort(self.token_ids, axis=1)
        return ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(axis=1)

    def _check_sampled(self, check, token_ids, log_probs, filled, complete, trained) -> None:
        token_ids = np.asarray(token_ids)
        matches = (self.token_ids == token_ids[:, None]) & (token_ids >= 0)[:, None]
        found = matches.any(axis=1)
        if complete:
            check.each_row(filled & ~found, "the sampled token {value} is not in its own support: are rows shifted?", token_ids)
        if log_probs is None or not self.k:
            return
        slot = matches.argmax(axis=1)
        theirs = np.take_along_axis(self.log_probs, slot[:, None], axis=1)[:, 0]
        difference = np.abs(theirs - np.asarray(log_probs, np.float64), where=found, out=np.zeros(len(self)))
        compared = found if trained is None else found & trained
        check.each_row(
            compared & ~(difference <= AGREEMENT),
            "the sampled token's log-prob differs by {value:.6g} from the same token's among the candidates: are rows shifted, "
            "or the temperatures different?",
            difference,
        )


class _RowCheck:
    """Raises for the first broken row of a check, and names it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def each_slot(self, broken: np.ndarray, values: np.ndarray, message: str) -> None:
        if broken.any():
            row, slot = np.argwhere(broken)[0]
            raise ValueError(f"{self.where}, row {row}, slot {slot}: {message.format(value=values[row, slot])}")

    def each_row(self, broken: np.ndarray, message: str, values: np.ndarray | None = None) -> None:
        if broken.any():
            row = int(np.argmax(broken))
            raise ValueError(f"{self.where}, row {row}: {message.format(value=None if values is None else values[row])}")
