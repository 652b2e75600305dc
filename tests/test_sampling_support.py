"""The compressed rows of filtered sampling."""

import numpy as np
import pytest

from miles_sc.sampling_support import SamplingSupport

ROWS = [[4, 2], [9], [0, 1, 7]]


def int32(*values):
    return np.array(values, np.int32)


def int64(*values):
    return np.array(values, np.int64)


def rows_of(support):
    return [support.ids[a:b].tolist() for a, b in zip(support.offsets[:-1], support.offsets[1:], strict=True)]


def test_rows_go_in_and_come_out():
    support = SamplingSupport.from_rows(ROWS)
    assert rows_of(support) == ROWS and len(support) == 3
    assert support.lengths.tolist() == [2, 1, 3]
    assert (support.ids.dtype, support.offsets.dtype) == (np.int32, np.int64)
    assert support.padded(4).tolist() == [[4, 2, -1, -1], [9, -1, -1, -1], [0, 1, 7, -1]]


@pytest.mark.parametrize("rows", [[], [[3]], ROWS])
def test_singletons_and_concatenation(rows):
    joined = SamplingSupport.concatenate(
        [SamplingSupport.from_rows(rows), SamplingSupport.singletons([8, 6]), SamplingSupport.empty()]
    )
    assert rows_of(joined) == [*rows, [8], [6]]
    assert joined.offsets.dtype == np.int64


@pytest.mark.parametrize("count", range(4))
def test_trim_drops_the_last_rows_without_a_copy(count):
    support = SamplingSupport.from_rows(ROWS)
    trimmed = support.trim(count)
    assert rows_of(trimmed) == ROWS[: 3 - count]
    assert count == 3 or np.shares_memory(trimmed.ids, support.ids)


@pytest.mark.parametrize("count", [-1, 4])
def test_trim_takes_only_what_is_there(count):
    with pytest.raises(ValueError, match=rf"trim\({count}\) of a support of 3 rows: give 0\.\.3"):
        SamplingSupport.from_rows(ROWS).trim(count)


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (int64(1, 2), int64(0, 2), r"ids are int64 \(2,\): give int32 \[total\]"),
        (int32(1, 2).reshape(1, 2), int64(0, 2), r"ids are int32 \(1, 2\)"),
        (int32(1, 2), int32(0, 2), r"offsets are int32 \(2,\): give int64 \[rows \+ 1\]"),
        (int32(), int64(), r"offsets are int64 \(0,\)"),
        (int32(1, 2), int64(1, 2), r"run from 1 to 2: they must run from 0 to "),
        (int32(1, 2), int64(0, 1), r"run from 0 to 1: they must run from 0 to "),
        (int32(1, 2), int64(0, 1, 1, 2), r"row 1 of the sampling support is empty"),
        (int32(1, 2), int64(0, 3, 2), r"row 1 of the sampling support is empty"),
    ],
)
def test_broken_rows_are_refused(ids, offsets, message):
    with pytest.raises(ValueError, match=message):
        SamplingSupport(ids, offsets)


def test_an_empty_row_is_refused_when_built_from_rows():
    with pytest.raises(ValueError, match="row 1 of the sampling support is empty: .*at least one id"):
        SamplingSupport.from_rows([[1], []])


def test_a_row_wider_than_the_arrays_names_the_flag():
    with pytest.raises(ValueError, match="row 2 .* holds 3 ids and only 2 .*: raise --rollout-top-logprobs-num to at least 3"):
        SamplingSupport.from_rows(ROWS).padded(2)


def test_no_rows():
    assert len(SamplingSupport.empty()) == 0
    assert SamplingSupport.empty().padded(3).shape == (0, 3)
