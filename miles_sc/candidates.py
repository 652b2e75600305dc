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
NO_TOKEN = np.iinfo(np.int32).min


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

    def holding(self, token_ids: np.ndarray) -> np.ndarray:
        """Bool ``[R, K]``: the slots that hold their row's token, of int ``[R]``; no slot holds a negative one."""
        narrow = token_ids.astype(np.int32)  # comparing equal types is twice as fast
        narrow[(narrow != token_ids) | (token_ids < 0)] = NO_TOKEN
        return self.token_ids == narrow[:, None]

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
        """Checks every row, always: whole arrays at a glance, and closely only where something looks wrong.

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
        expected = _Expected(
            vocab_size,
            None if sampled_token_ids is None else np.asarray(sampled_token_ids),
            None if sampled_log_probs is None else np.asarray(sampled_log_probs, np.float64),
            complete,
            trained,
        )
        if not expected.plainly_met_by(self):
            expected.check(self, where)


@dataclass(frozen=True)
class _Expected:
    """What each row must be, by two roads: `plainly_met_by` says quickly that all is well, `check` says slowly what is not.

    The first is exact where it says yes, and the second alone decides otherwise.
    """

    vocab_size: int | None
    sampled_token_ids: np.ndarray | None
    sampled_log_probs: np.ndarray | None
    complete: bool
    trained: np.ndarray | None

    def plainly_met_by(self, candidates: Candidates) -> bool:
        """True where no row can be broken: a sort, an exponential and a few passes over whole int32 and float32 arrays."""
        if candidates.token_ids.size == 0:
            return False
        in_order = np.sort(candidates.token_ids, axis=1)
        lowest, highest = int(in_order[:, 0].min()), int(in_order[:, -1].max())
        if lowest < -1 or (self.vocab_size is not None and highest >= self.vocab_size):
            return False
        if not _log_probs_fit(candidates, every_slot_used=lowest >= 0) or _any_repeats(in_order):
            return False
        filled = in_order[:, -1] >= 0
        if not _masses_fit(candidates.log_probs, whole=filled if self.complete else None):
            return False
        if self.trained is not None and (self.trained & ~filled).any():
            return False
        return self.sampled_token_ids is None or self._sampled_plainly_fits(candidates, filled)

    def _sampled_plainly_fits(self, candidates: Candidates, filled: np.ndarray) -> bool:
        holding = candidates.holding(self.sampled_token_ids)
        places = holding.argmax(axis=1) + np.arange(0, holding.size, candidates.k)
        found = holding.ravel()[places]
        if self.complete and (filled & ~found).any():
            return False
        if self.sampled_log_probs is None:
            return True
        compared = np.flatnonzero(found if self.trained is None else found & self.trained)
        difference = candidates.log_probs.ravel()[places[compared]] - self.sampled_log_probs[compared]
        return bool((np.abs(difference) <= AGREEMENT).all())

    def check(self, candidates: Candidates, where: str) -> None:
        """One condition after the other; raises for the first row that breaks it."""
        token_ids, log_probs, check = candidates.token_ids, candidates.log_probs, _RowCheck(where)
        used = token_ids >= 0
        check.each_slot(token_ids < -1, token_ids, "id {value}: ids are -1 (unused) or in the vocabulary")
        if self.vocab_size is not None:
            check.each_slot(
                token_ids >= self.vocab_size, token_ids, f"id {{value}} is outside the vocabulary of {self.vocab_size}: "
                "do sampler and trainer use one tokenizer?",
            )  # fmt: skip
        check.each_slot(
            used & ~(np.isfinite(log_probs) & (log_probs > MINUS_INFINITY)), log_probs,
            "log-prob {value}: a candidate's must be finite, and no number that stands for -inf",
        )  # fmt: skip
        check.each_slot(used & (log_probs > LOG_PROB_SLACK), log_probs, "log-prob {value} is above 0: these are not log-probs")
        check.each_slot(~used & (log_probs != -np.inf), log_probs, "log-prob {value} in an unused slot (id -1): it must be -inf")
        check.each_row(
            _repeats(np.sort(token_ids, axis=1)).any(axis=1), "an id stands twice: were candidates merged by token text?"
        )
        mass = _exact_masses(log_probs)
        check.each_row(mass > 1 + MASS_SLACK, "the candidates' mass {value:.6f} exceeds 1: these are not one distribution", mass)
        filled = used.any(axis=1)
        if self.complete:
            check.each_row(
                filled & (mass < 1 - MASS_SLACK), "the support's mass {value:.6f} is not 1: was it normalised after filtering?",
                mass,
            )  # fmt: skip
        if self.trained is not None:
            check.each_row(
                self.trained & ~filled, "no candidate on a trained token: its producer must record the sampler's candidates"
            )
        if self.sampled_token_ids is not None:
            self._check_sampled(candidates, filled, check)

    def _check_sampled(self, candidates: Candidates, filled: np.ndarray, check: "_RowCheck") -> None:
        holding = candidates.holding(self.sampled_token_ids)
        found = holding.any(axis=1)
        if self.complete:
            check.each_row(
                filled & ~found, "the sampled token {value} is not in its own support: are rows shifted?", self.sampled_token_ids
            )
        if self.sampled_log_probs is None:
            return
        # ids are distinct by now, so each row that is found is found once
        difference = np.zeros(len(candidates))
        difference[found] = np.abs(candidates.log_probs[holding] - self.sampled_log_probs[found])
        compared = found if self.trained is None else found & self.trained
        check.each_row(
            compared & ~(difference <= AGREEMENT),
            "the sampled token's log-prob differs by {value:.6g} from the same token's among the candidates: are rows shifted, "
            "or the temperatures different?",
            difference,
        )


def _log_probs_fit(candidates: Candidates, *, every_slot_used: bool) -> bool:
    """A used slot's log-prob lies in its range and an unused one's is -inf. NaN spreads to the extremes and fits no range."""
    log_probs = candidates.log_probs
    if not log_probs.max() <= LOG_PROB_SLACK:
        return False
    if every_slot_used:
        return bool(log_probs.min() > MINUS_INFINITY)
    used = candidates.token_ids >= 0
    return bool(((log_probs > MINUS_INFINITY) == used).all() and ((log_probs == -np.inf) != used).all())


def _repeats(in_order: np.ndarray) -> np.ndarray:
    """Bool ``[R, K - 1]`` of sorted ids ``[R, K]``: where one equals its neighbour."""
    return (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)


def _any_repeats(in_order: np.ndarray) -> bool:
    """Whether a row of contiguous sorted ids holds one twice; one long row is compared faster than many short ones."""
    flat = in_order.ravel()
    same = flat[1:] == flat[:-1]
    same[in_order.shape[1] - 1 :: in_order.shape[1]] = False  # neighbours of different rows
    return bool(same.any()) and bool(_repeats(in_order).any())


def _masses_fit(log_probs: np.ndarray, *, whole: np.ndarray | None) -> bool:
    """Whether no row's probabilities exceed 1 in sum, and those of the rows ``whole`` (bool ``[R]``) are 1."""
    mass = np.einsum("rk->r", np.exp(log_probs))
    # a float32 sum is off by less than K epsilon in whatever order it is formed, and exp adds a few
    error = (log_probs.shape[1] + 16) * np.finfo(np.float32).eps
    unsure = mass > 1 + MASS_SLACK - error
    if whole is not None:
        unsure |= whole & (mass < 1 - MASS_SLACK + error)
    if not unsure.any():
        return True
    exact = _exact_masses(log_probs[unsure])
    return not ((exact > 1 + MASS_SLACK).any() or (whole is not None and (whole[unsure] & (exact < 1 - MASS_SLACK)).any()))


def _exact_masses(log_probs: np.ndarray) -> np.ndarray:
    return np.exp(log_probs, dtype=np.float64).sum(axis=1)


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
