"""Candidates as a value, and each thing that their validation refuses."""

import numpy as np
import pytest

from miles_sc import Candidates

NAN, INF = float("nan"), float("inf")
IDS = np.array([[5, 2, 7], [1, 0, -1], [-1, -1, -1]], np.int32)
LOG_PROBS = np.log(
    np.array([[0.5, 0.3, 0.1], [0.6, 0.4, 0.0], [0.0, 0.0, 0.0]], np.float32),
    where=IDS >= 0,
    out=np.full(IDS.shape, -np.inf, np.float32),
)


def candidates(ids=IDS, log_probs=LOG_PROBS):
    return Candidates(np.array(ids, np.int32), np.array(log_probs, np.float32))


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        (IDS.astype(np.int64), LOG_PROBS, r"token_ids are int64 \(3, 3\): give a numpy int32 array \[rows, K\]"),
        (IDS, LOG_PROBS.astype(np.float64), r"log_probs are float64 \(3, 3\): give a numpy float32"),
        (IDS.tolist(), LOG_PROBS, r"token_ids are list: give"),
        (IDS[0], LOG_PROBS[0], r"token_ids are int32 \(3,\): give"),
        (IDS[:, :2], LOG_PROBS, r"\(3, 2\) and log_probs \(3, 3\): their shapes must be equal"),
        (None, LOG_PROBS, r"token_ids are NoneType: give"),
    ],
)
def test_other_arrays_are_refused(ids, log_probs, message):
    with pytest.raises(ValueError, match=message):
        Candidates(ids, log_probs)


def test_gap_rows_hold_nothing():
    gap = Candidates.gap(2, 3)
    assert len(gap) == 2 and gap.k == 3
    assert (gap.token_ids == -1).all() and np.isneginf(gap.log_probs).all()
    assert (gap.token_ids.dtype, gap.log_probs.dtype) == (np.int32, np.float32)


def test_concatenate_append_gap_and_trim_keep_rows_in_order():
    whole = Candidates.concatenate([candidates(), candidates(IDS[:1], LOG_PROBS[:1])]).append_gap(2)
    np.testing.assert_array_equal(whole.token_ids, [*IDS.tolist(), IDS[0].tolist(), [-1] * 3, [-1] * 3])
    np.testing.assert_array_equal(whole.log_probs[:4], [*LOG_PROBS, LOG_PROBS[0]])
    assert np.isneginf(whole.log_probs[4:]).all()
    back = whole.trim(3)
    np.testing.assert_array_equal(back.token_ids, IDS)
    np.testing.assert_array_equal(back.log_probs, LOG_PROBS)


def test_trim_and_a_single_part_copy_nothing():
    whole = candidates()
    assert np.shares_memory(whole.trim(1).token_ids, whole.token_ids)
    assert Candidates.concatenate([whole]) is whole
    assert len(whole.trim(3)) == 0 and whole.trim(3).k == 3


def test_parts_of_different_k_do_not_join():
    with pytest.raises(ValueError, match=r"K in \[2, 3\] cannot be joined"):
        Candidates.concatenate([candidates(), Candidates.gap(1, 2)])


@pytest.mark.parametrize("rows", [-1, 4])
def test_trim_takes_only_what_is_there(rows):
    with pytest.raises(ValueError, match=rf"trim\({rows}\) of candidates with 3 rows: give 0\.\.3"):
        candidates().trim(rows)


@pytest.mark.parametrize("k", [1, 3])
def test_what_is_whole_passes_and_read_only_arrays_are_left_alone(k):
    whole = Candidates(frozen(IDS[:, :k]), frozen(LOG_PROBS[:, :k]))
    whole.validate(vocab_size=8, sampled_token_ids=np.array([5, 3, 9]), sampled_log_probs=np.array([np.log(0.5), -4, 0.0]))
    np.testing.assert_array_equal(whole.token_ids, IDS[:, :k])
    np.testing.assert_array_equal(whole.log_probs, LOG_PROBS[:, :k])


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


BROKEN = [  # ids, log-probs, options, message
    (changed(IDS, (0, 2), 8), LOG_PROBS, {"vocab_size": 8}, "row 0, slot 2: id 8 is outside the vocabulary of 8: .*"),
    (changed(IDS, (1, 2), -2), LOG_PROBS, {}, r"row 1, slot 2: id -2: ids are -1 \(unused\) or in the vocabulary"),
    (changed(IDS, (0, 2), 5), LOG_PROBS, {}, r"row 0: an id stands twice: were candidates merged by token text"),
    (IDS, changed(LOG_PROBS, (0, 1), NAN), {}, r"row 0, slot 1: log-prob nan: .*finite"),
    (IDS, changed(LOG_PROBS, (1, 0), -INF), {}, r"row 1, slot 0: log-prob -inf: .*finite"),
    (IDS, changed(LOG_PROBS, (1, 0), np.finfo(np.float32).min), {}, r"row 1, slot 0: log-prob -3\.4\d*e\+38: .*-inf"),
    (IDS, changed(LOG_PROBS, (1, 0), np.finfo(np.float16).min), {}, r"row 1, slot 0: log-prob -65504\.0: .*-inf"),
    (IDS, changed(LOG_PROBS, (0, 2), 1e-3), {}, r"row 0, slot 2: log-prob 0\.001\S* is above 0"),
    (IDS, changed(LOG_PROBS, (1, 2), 0.0), {}, r"row 1, slot 2: log-prob 0\.0 in an unused slot .*must be -inf"),
    (IDS, changed(LOG_PROBS, (1, 2), NAN), {}, r"row 1, slot 2: log-prob nan in an unused slot"),
    (IDS, changed(LOG_PROBS, (1, 0), np.log(0.6002)), {}, r"row 1: the candidates' mass 1\.0002\d\d exceeds 1"),
    (IDS, LOG_PROBS, {"complete": True}, r"row 0: the support's mass 0\.900000 is not 1: .*normalised"),
    (IDS, LOG_PROBS, {"trained": np.array([True, True, True])}, r"row 2: no candidate on a trained token"),
]


@pytest.mark.parametrize(("ids", "log_probs", "options", "message"), BROKEN)
def test_a_broken_row_is_named(ids, log_probs, options, message):
    with pytest.raises(ValueError, match="here, " + message):
        candidates(ids, log_probs).validate(where="here", **options)


@pytest.mark.parametrize("difference, broken", [(5e-5, False), (2e-4, True), (-2e-4, True), (NAN, True)])
def test_two_reports_of_one_log_prob_must_agree(difference, broken):
    options = dict(sampled_token_ids=np.array([2, 1, 0]), sampled_log_probs=LOG_PROBS[[0, 1, 2], [1, 0, 0]].astype(np.float64))
    options["sampled_log_probs"][1] += difference
    options["sampled_log_probs"][2] = NAN  # a gap row is compared with nothing
    if not broken:
        candidates().validate(**options)
        return
    with pytest.raises(ValueError, match=r"candidates, row 1: the sampled token's log-prob differs by .*shifted.*temperatures"):
        candidates().validate(**options)
    candidates().validate(**options, trained=np.array([True, False, False]))


def test_a_complete_row_holds_what_was_sampled():
    options = dict(complete=True, sampled_token_ids=np.array([7, 6]))
    ids, log_probs = [[5, 7, -1], [1, 0, -1]], [[np.log(0.5), np.log(0.5), -INF], [np.log(0.6), np.log(0.4), -INF]]
    with pytest.raises(ValueError, match=r"row 1: the sampled token 6 is not in its own support: are rows shifted"):
        candidates(ids, log_probs).validate(**options)
    # a gap row (an observation) has no support of its own to be in
    candidates([ids[0], [-1] * 3], [log_probs[0], [-INF] * 3]).validate(**options)


def test_an_unused_sampled_id_matches_no_unused_slot():
    candidates().validate(sampled_token_ids=np.array([5, -1, -1]), sampled_log_probs=np.array([np.log(0.5), -9.0, -9.0]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_or_no_slots_are_valid(shape):
    rows = shape[0]
    empty = Candidates.gap(*shape)
    empty.validate(vocab_size=5, sampled_token_ids=np.zeros(rows, np.int64), sampled_log_probs=np.full(rows, -1.0))
    assert empty.append_gap(1).token_ids.shape == (rows + 1, shape[1])


@pytest.mark.parametrize("excess, broken", [(5e-7, False), (2e-6, True)])
def test_float32_rounding_above_zero_is_allowed(excess, broken):
    one = candidates([[4]], [[excess]])
    if broken:
        with pytest.raises(ValueError, match="above 0"):
            one.validate()
    else:
        one.validate(complete=True)
        assert one.log_probs[0, 0] > 0
