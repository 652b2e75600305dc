"""Validation against a slow, obvious oracle: it refuses the same rows for the same reason, and no other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_sc.candidates import AGREEMENT, LOG_PROB_SLACK, MASS_SLACK, MINUS_INFINITY, Candidates

NAN, INF = float("nan"), float("inf")
VOCAB = 9

# --- the oracle


def first_fault(ids, log_probs, *, vocab_size, sampled_token_ids, sampled_log_probs, complete, trained):
    """Row and reason of the first condition that a row breaks, conditions in their order; None where all hold."""
    ids, log_probs = ids.tolist(), log_probs.tolist()
    token_of, log_prob_of = list(sampled_token_ids), list(sampled_log_probs)

    def slots(row):
        return list(zip(ids[row], log_probs[row], strict=True))

    def used(row):
        return {token: value for token, value in slots(row) if token >= 0}

    def mass(row):
        return math.fsum(math.exp(value) for token, value in slots(row) if token >= 0)

    def is_sampled(row):
        return token_of[row] in used(row)

    def differs(row):
        return not abs(used(row)[token_of[row]] - log_prob_of[row]) <= AGREEMENT

    conditions = {
        "ids are -1": lambda row: any(token < -1 for token in ids[row]),
        "outside the vocabulary": lambda row: vocab_size is not None and any(token >= vocab_size for token in ids[row]),
        "must be finite": lambda row: any(t >= 0 and not (math.isfinite(v) and v > MINUS_INFINITY) for t, v in slots(row)),
        "is above 0": lambda row: any(t >= 0 and v > LOG_PROB_SLACK for t, v in slots(row)),
        "in an unused slot": lambda row: any(t < 0 and v != -INF for t, v in slots(row)),
        "an id stands twice": lambda row: len(used(row)) < sum(token >= 0 for token in ids[row]),
        "exceeds 1": lambda row: mass(row) > 1 + MASS_SLACK,
        "is not 1": lambda row: complete and used(row) and mass(row) < 1 - MASS_SLACK,
        "no candidate on a trained token": lambda row: trained is not None and trained[row] and not used(row),
        "is not in its own support": lambda row: complete and used(row) and not is_sampled(row),
        "log-prob differs": lambda row: is_sampled(row) and (trained is None or trained[row]) and differs(row),
    }
    return next(((row, reason) for reason, broken in conditions.items() for row in range(len(ids)) if broken(row)), None)


# --- rows that are almost right

MASSES = [1, 1, 1, 1, 1 - 5e-5, 1 + 5e-5, 1 - MASS_SLACK, 1 + MASS_SLACK, 1 - 2e-4, 1 + 2e-4, 0.3]
DIFFERENCES = [0, 0, 0, 5e-5, -5e-5, 2e-4, -2e-4, NAN, INF]
ODD_IDS = [-(2**31), -7, -1, 0, VOCAB - 1, VOCAB, 2**31 - 1]
ODD_LOG_PROBS = [NAN, INF, -INF, -3.4e38, MINUS_INFINITY, -65503.0, -100.0, -0.0, 0.0, 9e-7, LOG_PROB_SLACK, 2e-6, 0.5, 90.0]


@st.composite
def nearly_valid(draw):
    """(ids, log-probs, options): rows of a distribution with gaps anywhere, and up to two slots spoiled."""
    rows, k = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    ids, log_probs = np.full((rows, k), -1, np.int32), np.full((rows, k), -np.inf, np.float32)
    tokens, sampled = np.zeros(rows, np.int64), np.zeros(rows)
    for row in range(rows):
        order = draw(st.permutations(range(VOCAB)))
        slots = draw(st.permutations(range(k)))[: draw(st.integers(0, k))]
        weights = np.array([draw(st.sampled_from([1e-6, 0.01, 0.2, 1.0])) for _ in slots])
        ids[row, slots] = order[: len(slots)]
        log_probs[row, slots] = np.log(weights / weights.sum() * draw(st.sampled_from(MASSES)))
        tokens[row] = draw(st.sampled_from([*order[: max(len(slots), 1)], order[-1], -1, 2**32 + order[0]]))
        reported = log_probs[row, ids[row] == tokens[row]]
        sampled[row] = (reported[0] if reported.size and tokens[row] >= 0 else -1.0) + draw(st.sampled_from(DIFFERENCES))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, k - 1))
        if draw(st.booleans()):
            ids[place] = draw(st.sampled_from([*ODD_IDS, *ids[place[0]].tolist()]))
        else:
            log_probs[place] = draw(st.sampled_from(ODD_LOG_PROBS))
    options = {
        "vocab_size": draw(st.sampled_from([None, VOCAB])),
        "sampled_token_ids": tokens,
        "sampled_log_probs": sampled,
        "complete": draw(st.booleans()),
        "trained": draw(st.none() | st.lists(st.booleans(), min_size=rows, max_size=rows).map(np.array)),
    }
    return ids, log_probs, options


@given(case=nearly_valid())
@settings(max_examples=400, deadline=None)
def test_the_first_broken_row_is_the_oracles(case):
    ids, log_probs, options = case
    fault = first_fault(ids, log_probs, **options)
    if fault is None:
        Candidates(ids, log_probs).validate(**options)
        return
    row, reason = fault
    with pytest.raises(ValueError, match=rf"^candidates, row {row}\b.*{reason}"):
        Candidates(ids, log_probs).validate(**options)


# --- what a look at whole arrays could get wrong


@pytest.mark.parametrize("k", [1, 7, 128, 1000, 5000])
@pytest.mark.parametrize("bound", [1 + MASS_SLACK, 1 - MASS_SLACK])
def test_a_mass_beside_its_bound_is_summed_exactly(k, bound):
    """The float32 values decide, by their float64 sum, however many they are."""
    rng, verdicts = np.random.default_rng(k), set()
    for shift in np.linspace(-4e-7, 4e-7, 17):
        weights = rng.random(k)
        log_probs = np.log(weights / weights.sum() * (bound + shift)).astype(np.float32)[None]
        one_row = Candidates(np.arange(k, dtype=np.int32)[None], np.minimum(log_probs, LOG_PROB_SLACK))
        mass = math.fsum(np.exp(one_row.log_probs[0].astype(np.float64)))
        broken = mass > 1 + MASS_SLACK or mass < 1 - MASS_SLACK
        verdicts.add(broken)
        if broken:
            with pytest.raises(ValueError, match="row 0: .* mass (1.0001|0.9999).* (exceeds 1|is not 1)"):
                one_row.validate(complete=True)
        else:
            one_row.validate(complete=True)
    assert verdicts == {True, False} or (k == 1 and bound > 1)


def many_rows(rows=300, k=128):
    """Distinct ids in every row, and nearly all of the mass."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(1000)[:k] for _ in range(rows)]).astype(np.int32)
    log_probs = -np.log(k) + np.linspace(0.2, -0.4, k) + np.zeros((rows, 1))
    return ids, log_probs.astype(np.float32)


FAULTS = [  # array to change, slot, value or the slot whose value it takes, reason
    ("ids", 127, 0, "an id stands twice"),
    ("ids", 64, 63, "an id stands twice"),
    ("ids", 0, -2, "id -2"),
    ("ids", 127, 1000, "id 1000 is outside the vocabulary"),
    ("log_probs", 127, NAN, "log-prob nan"),
    ("log_probs", 0, -INF, "log-prob -inf"),
    ("log_probs", 5, -65504.0, "stands for -inf"),
    ("log_probs", 5, 2e-6, "above 0"),
    ("log_probs", 5, -0.3, "exceeds 1"),
]


@pytest.mark.parametrize("row", [0, 1, 150, 298, 299])
@pytest.mark.parametrize(("array", "slot", "value", "reason"), FAULTS)
def test_a_fault_is_found_in_any_of_many_rows(row, array, slot, value, reason):
    ids, log_probs = many_rows()
    Candidates(ids, log_probs).validate(vocab_size=1000)
    if array == "log_probs":
        log_probs[row, slot] = value
    else:
        ids[row, slot] = ids[row, value] if reason == "an id stands twice" else value
    with pytest.raises(ValueError, match=f"row {row}[,:].*{reason}"):
        Candidates(ids, log_probs).validate(vocab_size=1000)


def test_neighbouring_rows_may_share_ids():
    rows = np.array([[0, 1, 2], [2, 3, 4], [4, 0, 1], [4, 0, 1], [4, 5, 6]], np.int32)
    for ids in (rows, rows[:, :1].copy()):
        Candidates(ids, np.full(ids.shape, -2.0, np.float32)).validate(vocab_size=7)


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda array: np.repeat(array, 2, axis=1)[:, ::2]])
def test_arrays_may_lie_in_memory_in_any_order(layout):
    ids, log_probs = many_rows()
    sampled = {"sampled_token_ids": ids[:, 3].astype(np.int64), "sampled_log_probs": log_probs[:, 3].astype(np.float64)}
    Candidates(layout(ids), layout(log_probs)).validate(vocab_size=1000, **sampled)
    ids[7, 9] = ids[7, 90]
    with pytest.raises(ValueError, match="row 7: an id stands twice"):
        Candidates(layout(ids), layout(log_probs)).validate(vocab_size=1000, **sampled)
    sampled["sampled_log_probs"][5] -= 1e-3
    with pytest.raises(ValueError, match="row 5: the sampled token's log-prob differs by 0.001"):
        Candidates(layout(many_rows()[0]), layout(log_probs)).validate(vocab_size=1000, **sampled)
