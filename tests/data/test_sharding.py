"""The plan of a rollout over ranks and optimizer steps."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_sc.data.sharding import shard
from miles_sc.loss.reduction import row_weights


def train_data(lengths, masks=None):
    """Sample i has ``lengths[i]`` tokens, all but the first of them response."""
    masks = masks or [[1] * (length - 1) for length in lengths]
    return {
        "tokens": [np.full(length, i, np.int32) for i, length in enumerate(lengths)],
        "response_lengths": [length - 1 for length in lengths],
        "loss_masks": [np.array(mask, np.uint8) for mask in masks],
        "sample_indices": [100 + i for i in range(len(lengths))],
        "rollout_topk_token_ids": [None] * len(lengths),
    }


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_sample_exactly_once_and_the_same_number_of_passes_everywhere(data):
    world_size = data.draw(st.integers(1, 4))
    batch = world_size * data.draw(st.integers(1, 4))
    steps = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(2, 20), min_size=batch * steps, max_size=batch * steps))
    micro_batch_size, max_tokens = data.draw(st.integers(1, 3)), data.draw(st.none() | st.integers(1, 60))
    columns = train_data(lengths)
    shards = shard(
        columns,
        world_size=world_size,
        global_batch_size=batch,
        per_token=data.draw(st.booleans()),
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
    )
    owned = [index - 100 for part in shards for index in part.data["sample_indices"]]
    assert sorted(owned) == list(range(batch * steps))
    for part in shards:
        rows = part.data["sample_indices"]
        assert {name: len(column) for name, column in part.data.items()} == {
            name: len(rows) for name in [*columns, "row_weights"]
        }
        assert [ids[0] + 100 for ids in part.data["tokens"]] == rows
        assert sorted(i for step in part.steps for members in step for i in members) == list(range(len(rows)))
    for step in range(steps):
        passes = [part.steps[step] for part in shards]
        assert len({len(of_rank) for of_rank in passes}) == 1
        trained = [part.data["sample_indices"][i] - 100 for part in shards for members in part.steps[step] for i in members]
        assert sorted(trained) == list(range(step * batch, (step + 1) * batch))
        counts = [sum(map(len, of_rank)) for of_rank in passes]
        assert set(counts) == {batch // world_size}
        for part in shards:
            for members in part.steps[step]:
                padded = len(members) * max([part.data["tokens"][i].size for i in members], default=0)
                if max_tokens is None:
                    assert len(members) <= micro_batch_size
                else:
                    assert padded <= max_tokens or len(members) == 1
        # no pass is empty on every rank
        assert all(any(of_rank[place] for of_rank in passes) for place in range(len(passes[0])))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_weights_of_a_step_sum_to_one_over_all_ranks(world_size, per_token):
    lengths, masks = (
        [3, 9, 4, 6, 2, 8, 5, 7],
        [[1] * 2, [1, 0] * 4, [0] * 3, [1] * 5, [1], [1] * 7, [0] * 4, [1, 1, 0, 0, 1, 0]],
    )
    data = train_data(lengths, masks)
    shards = shard(data, world_size=world_size, global_batch_size=4, per_token=per_token)
    for step in range(2):
        total = sum(
            part.data["row_weights"][i] * part.data["loss_masks"][i].sum()
            for part in shards
            for members in part.steps[step]
            for i in members
        )
        assert total == pytest.approx(1)
    # a sample's weight is that of its own step, wherever it went
    expected = row_weights(data["loss_masks"][:4], per_token=per_token) + row_weights(data["loss_masks"][4:], per_token=per_token)
    for part in shards:
        got = dict(zip(part.data["sample_indices"], part.data["row_weights"], strict=True))
        assert got == {index: expected[index - 100] for index in got}


def test_tokens_come_out_even_over_the_ranks():
    lengths = [100, 2, 90, 3, 80, 4, 70, 5]
    shards = shard(train_data(lengths), world_size=2, global_batch_size=8, per_token=True)
    assert [sum(ids.size for ids in part.data["tokens"]) for part in shards] == [177, 177]


def test_neighbours_in_length_share_a_pass():
    shards = shard(train_data([9, 2, 8, 3]), world_size=1, global_batch_size=4, per_token=True, micro_batch_size=2)
    lengths = [[shards[0].data["tokens"][i].size for i in members] for members in shards[0].steps[0]]
    assert lengths == [[9, 8], [3, 2]]


def test_a_long_sample_passes_alone_and_the_other_rank_waits_with_an_empty_pass():
    shards = shard(train_data([50, 5, 5, 5]), world_size=2, global_batch_size=4, per_token=True, max_tokens=10)
    sizes = [[[part.data["tokens"][i].size for i in members] for members in part.steps[0]] for part in shards]
    assert sizes == [[[50], [5]], [[5, 5], []]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch_size": 3},
            "--global-batch-size 3 does not divide the rollout's 4 samples: set it to a divisor",
        ),
        ({"global_batch_size": 8}, "--global-batch-size 8 does not divide the rollout's 4 samples"),
        ({"world_size": 4, "global_batch_size": 2}, "--global-batch-size 2 does not divide over 4 data-parallel ranks"),
    ],
)
def test_batch_sizes_must_divide(options, message):
    with pytest.raises(ValueError, match=message):
        shard(train_data([3] * 4), **{"world_size": 1, "per_token": True, **options})


def test_shards_leave_the_train_data_alone_and_share_its_arrays():
    data = train_data([3, 4])
    (part,) = shard(data, world_size=1, global_batch_size=2, per_token=False)
    assert "row_weights" not in data
    assert {id(array) for array in part.data["tokens"]} == {id(array) for array in data["tokens"]}


# --- row weights


@pytest.mark.parametrize(
    ("masks", "per_token", "expected"),
    [
        ([[1, 1], [1, 1, 1, 1]], True, [1 / 6, 1 / 6]),
        ([[1, 1], [1, 1, 1, 1]], False, [1 / 4, 1 / 8]),
        # what is masked is in no denominator: neither a token of a sample nor a sample of the batch
        ([[1, 0, 0, 1], [0, 0], [1]], True, [1 / 3, 0, 1 / 3]),
        ([[1, 0, 0, 1], [0, 0], [1]], False, [1 / 4, 0, 1 / 2]),
        ([[0], []], True, [0, 0]),
        ([[0], []], False, [0, 0]),
    ],
)
def test_row_weights(masks, per_token, expected):
    weights = row_weights([np.array(mask, np.uint8) for mask in masks], per_token=per_token)
    assert weights == pytest.approx(expected)
    assert all(isinstance(weight, float) and math.isfinite(weight) for weight in weights)


def test_many_tokens_do_not_overflow_the_masks_own_dtype():
    assert row_weights([np.ones(300, np.uint8)], per_token=True) == [1 / 300]


@pytest.mark.parametrize(("sizes", "message"), [((0, 4), "world_size 0"), ((1, 0), "--global-batch-size 0")])
def test_sizes_below_one_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"{message}: give at least 1"):
        shard(train_data([3, 3, 3, 3]), world_size=sizes[0], global_batch_size=sizes[1], per_token=True)
