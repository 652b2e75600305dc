"""Context-parallel layouts against plain loops over samples and tokens."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.parallel.context import ContextLayout, attention_mask, context_map
from tests.distributed.rollouts import train_data

CPU, VOCAB, K, PAD = torch.device("cpu"), 23, 3, 22
layouts = st.builds(ContextLayout, st.sampled_from(["thd", "bshd"]), st.booleans(), st.integers(1, 4))
some_lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=5)
checked = settings(max_examples=100, deadline=None)


def maps_of(lengths, layout):
    """One map per rank; lengths are prompt and response of every sample."""
    total, response = [prompt + n for prompt, n in lengths], [n for _, n in lengths]
    return [context_map(total, response, layout, rank=rank) for rank in range(layout.size)]


def parts_of(row, rank, size, zigzag):
    """A rank's part of a list of slots, None where it is padded."""
    chunks = 2 * size if zigzag and size > 1 else size
    width = -(-len(row) // chunks)
    row = row + [None] * (width * chunks - len(row))
    held = [rank, chunks - 1 - rank] if chunks > size else [rank]
    return [slot for chunk in held for slot in row[chunk * width : (chunk + 1) * width]]


def tokens_held(lengths, layout, rank):
    """[B][S] of (sample, place) or None, as CONTRACT 8 says it."""
    samples = [[(i, t) for t in range(prompt + n)] for i, (prompt, n) in enumerate(lengths)]
    zigzag = not layout.allgather
    if layout.qkv_format == "bshd":
        width = max(len(sample) for sample in samples)
        return [parts_of(sample + [None] * (width - len(sample)), rank, layout.size, zigzag) for sample in samples]
    if zigzag:
        return [[slot for sample in samples for slot in parts_of(sample, rank, layout.size, zigzag)]]
    return [parts_of([slot for sample in samples for slot in sample], rank, layout.size, zigzag)]


def held(slots, lengths):
    """The same of a map."""
    total = [prompt + n for prompt, n in lengths]
    pairs = zip(slots.samples.reshape(-1).tolist(), slots.positions.reshape(-1).tolist(), strict=True)
    flat = [(i, t) if i >= 0 and t < total[i] else None for i, t in pairs]
    width = slots.samples.shape[1]
    return [flat[start : start + width] for start in range(0, len(flat), width)]


# --- the maps


@given(some_lengths, layouts)
@checked
def test_every_rank_holds_what_the_rule_says(lengths, layout):
    for rank, slots in enumerate(maps_of(lengths, layout)):
        assert held(slots, lengths) == tokens_held(lengths, layout, rank)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # a sample of 5 (chunks of 2: 01 23 4. ..), one of 3 (chunks of 1: 0 1 2 .)
        (ContextLayout("thd", False, 2), [[[0, 1, -1, -1, 5, -1]], [[2, 3, 4, -1, 6, 7]]]),
        (ContextLayout("thd", True, 2), [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        (ContextLayout("bshd", False, 2), [[[0, 1, -1, -1], [5, 6, -1, -1]], [[2, 3, 4, -1], [7, -1, -1, -1]]]),
        (ContextLayout("bshd", True, 2), [[[0, 1, 2], [5, 6, 7]], [[3, 4, -1], [-1, -1, -1]]]),
        (ContextLayout("thd"), [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
        (ContextLayout("bshd"), [[[0, 1, 2, 3, 4], [5, 6, 7, -1, -1]]]),
    ],
)
def test_two_samples_by_hand(layout, expected):
    assert [slots.tokens.tolist() for slots in maps_of([(2, 3), (1, 2)], layout)] == expected


@given(some_lengths, layouts)
@checked
def test_every_token_is_held_once_and_ranks_have_one_shape(lengths, layout):
    maps = maps_of(lengths, layout)
    tokens = np.concatenate([slots.tokens.reshape(-1) for slots in maps])
    assert sorted(tokens[tokens >= 0].tolist()) == list(range(sum(prompt + n for prompt, n in lengths)))
    assert len({slots.samples.shape for slots in maps}) == 1
    for slots in maps:
        assert slots.samples.shape == slots.positions.shape == slots.tokens.shape
        assert slots.samples.dtype == slots.positions.dtype == slots.tokens.dtype == slots.rows.dtype == np.int64


@given(some_lengths, layouts)
@checked
def test_every_response_token_is_scored_once_by_the_token_before_it(lengths, layout):
    places = list(_response_places(lengths))
    scored = []
    for slots in maps_of(lengths, layout):
        before, predicted = slots.tokens.reshape(-1)[slots.rows], slots.response_rows
        assert [places[row] for row in predicted] == (before + 1).tolist()
        assert all(a < b for a, b in pairwise(slots.rows.tolist()))
        scored += predicted.tolist()
    assert sorted(scored) == list(range(len(places)))


def _response_places(lengths):
    """Of every response token, its place in all samples' tokens joined."""
    start = 0
    for prompt, response in lengths:
        yield from range(start + prompt, start + prompt + response)
        start += prompt + response


@given(some_lengths, layouts)
@checked
def test_rows_of_a_sample_are_counted_from_its_first_response_token(lengths, layout):
    for rank, slots in enumerate(maps_of(lengths, layout)):
        mine = {slot for row in tokens_held(lengths, layout, rank) for slot in row}
        for sample, (prompt, response) in enumerate(lengths):
            expected = [j for j in range(response) if (sample, prompt + j - 1) in mine]
            assert slots.response_rows_of(sample).tolist() == expected


@given(some_lengths, layouts)
@checked
def test_the_planned_number_of_tokens_is_the_number_of_slots(lengths, layout):
    planned = layout.tokens_per_rank([prompt + n for prompt, n in lengths])
    assert {slots.samples.size for slots in maps_of(lengths, layout)} == {planned}


@given(layouts)
@checked
def test_no_samples_give_padding_of_one_shape_and_no_row(layout):
    maps = maps_of([], layout)
    assert len({slots.samples.shape for slots in maps}) == 1
    for slots in maps:
        assert slots.samples.size and (slots.tokens == -1).all() and not slots.rows.size and not slots.response_rows.size
        assert attention_mask(maps, 0).any(axis=2).all()


@given(some_lengths, layouts)
@settings(max_examples=60, deadline=None)
def test_a_token_sees_its_own_sample_up_to_itself(lengths, layout):
    maps = maps_of(lengths, layout)
    by_rank = [tokens_held(lengths, layout, rank) for rank in range(layout.size)]
    for rank in range(layout.size):
        mask = attention_mask(maps, rank)
        assert mask.shape == (*maps[rank].samples.shape, maps[rank].samples.shape[1] * layout.size)
        for row, queries in enumerate(by_rank[rank]):
            keys = [key for other in by_rank for key in other[row]]
            for place, query in enumerate(queries):
                seen = mask[row, place].tolist()
                if query is None:  # padding: of no consequence, but softmax needs a key and nobody may notice
                    assert any(seen)
                else:
                    assert seen == [key is not None and key[0] == query[0] and key[1] <= query[1] for key in keys]
                foreign = {key[0] for key, visible in zip(keys, seen, strict=True) if visible and key is not None}
                assert len(foreign) <= 1


# --- errors


@pytest.mark.parametrize(("total", "response"), [([3, 2], [1, 2]), ([3, 2], [1, 5]), ([3, 2], [1, -1]), ([3, 0], [1, 0])])
def test_a_response_needs_a_prompt(total, response):
    with pytest.raises(ValueError, match=f"sample 1 has {total[1]} tokens and a response of {response[1]}.*prompt token"):
        context_map(total, response, ContextLayout())


def test_lengths_come_in_pairs():
    with pytest.raises(ValueError, match="2 total lengths and 1 response lengths"):
        context_map([3, 2], [1], ContextLayout())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qkv_format": "sbhd"}, "--qkv-format sbhd: choose thd or bshd"),
        ({"size": 0}, "--context-parallel-size 0: set at least 1"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ContextLayout(**options)


# --- micro-batches


def rollout(lengths, *, filtered=False, compact=False):
    data = train_data(vocab_size=VOCAB, k=K, filtered=filtered, lengths=lengths)
    data["row_weights"] = [0.125 * (i + 1) for i in range(len(lengths))]
    if compact:  # the ids stand in the recorded support, of which lengths are the valid prefixes
        used = [ids >= 0 for ids in data["rollout_topk_token_ids"]]
        data["rollout_sampling_mask_ids"] = [
            ids[u].astype(np.int32) for ids, u in zip(data["rollout_topk_token_ids"], used, strict=True)
        ]
        data["rollout_sampling_mask_offsets"] = [np.append(0, u.sum(axis=1).cumsum()).astype(np.int64) for u in used]
        data["rollout_topk_lengths"] = [u.sum(axis=1).astype(np.int32) for u in used]
        data["rollout_topk_token_ids"] = [None] * len(lengths)
    return data


def on_every_rank(data, members, layout):
    return [build_micro_batch(data, members, CPU, pad_token_id=PAD, layout=layout, rank=rank) for rank in range(layout.size)]


@st.composite
def members_of(draw, lengths):
    return draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]


@given(st.data(), some_lengths, layouts, st.sampled_from(["unfiltered", "filtered", "compact"]))
@checked
def test_rows_of_all_ranks_are_the_samples_own(drawn, lengths, layout, kind):
    members, filtered = drawn.draw(members_of(lengths)), kind != "unfiltered"
    batches = on_every_rank(rollout(lengths, filtered=filtered, compact=kind == "compact"), members, layout)
    found = {}
    for batch in batches:
        for row in range(len(batch.rows)):
            found.setdefault(batch.describe(row), []).append(row_of_batch(batch, row))
    data = rollout(lengths, filtered=filtered)
    expected = {
        f"sample {100 + i}, response token {j}": [row_of_sample(data, i, j)] for i in members for j in range(lengths[i][1])
    }
    assert found == expected


def row_of_batch(batch, row):
    """What the loss is given of a row, and the slot that predicts it."""
    loss, slot = batch.loss, batch.rows[row]
    return {
        "read": [batch.input_ids.flatten()[slot].item(), batch.position_ids.flatten()[slot].item()],
        "selected_ids": loss.selected_ids[row].tolist(),
        "of_sample": [loss.weights[row].item(), loss.advantages[row].item()],
        "active": loss.active[row].item(),
        "log_probs": [values[row].item() for values in (loss.rollout_log_probs, loss.ref_log_probs, loss.old_log_probs)],
        "candidate_log_probs": loss.candidate_log_probs[row].tolist(),
    }


def row_of_sample(data, i, j):
    """What it should be given of response token j of sample i."""
    tokens = data["tokens"][i].tolist()
    predicted = len(tokens) - data["response_lengths"][i] + j
    return {
        "read": [tokens[predicted - 1], predicted - 1],
        "selected_ids": [tokens[predicted], *data["rollout_topk_token_ids"][i][j].tolist()],
        "of_sample": [data["row_weights"][i], np.float32(data["rewards"][i]).item()],
        "active": bool(data["loss_masks"][i][j]),
        "log_probs": [data[name][i][j].item() for name in ("rollout_log_probs", "ref_log_probs", "old_log_probs")],
        "candidate_log_probs": data["rollout_topk_log_probs"][i][j].tolist(),
    }


@given(some_lengths, layouts)
@checked
def test_input_ids_are_the_tokens_and_padding_is_padding(lengths, layout):
    data = rollout(lengths)
    for rank, batch in enumerate(on_every_rank(data, range(len(lengths)), layout)):
        expected = [
            [data["tokens"][slot[0]][slot[1]] if slot else PAD for slot in row] for row in tokens_held(lengths, layout, rank)
        ]
        assert batch.input_ids.tolist() == expected
        for places, row in zip(batch.position_ids.tolist(), tokens_held(lengths, layout, rank), strict=True):
            assert all(slot is None or place == slot[1] for place, slot in zip(places, row, strict=True))
        assert batch.input_ids.dtype == batch.position_ids.dtype == batch.rows.dtype == torch.int64
        assert torch.equal(batch.attention_mask(), torch.from_numpy(attention_mask(batch.maps, rank)))


@given(st.data(), some_lengths, layouts)
@checked
def test_values_go_back_to_their_samples(drawn, lengths, layout):
    members = drawn.draw(members_of(lengths))
    parts = []
    for batch in on_every_rank(rollout(lengths), members, layout):
        parts.append(batch.by_sample(batch.loss.ref_log_probs))
        assert [len(values) for values in parts[-1]] == [lengths[i][1] for i in members]
    for place, i in enumerate(members):
        values = np.stack([part[place] for part in parts])
        assert (np.isfinite(values).sum(axis=0) == 1).all()  # one rank has each
        assert np.nansum(values, axis=0).tolist() == rollout(lengths)["ref_log_probs"][i].tolist()


@given(layouts)
@checked
def test_a_micro_batch_of_nobody_has_a_shape_and_no_row(layout):
    batches = on_every_rank(rollout([(2, 3)]), [], layout)
    assert len({batch.input_ids.shape for batch in batches}) == 1
    for batch in batches:
        assert batch.input_ids.numel() and (batch.input_ids == PAD).all() and not batch.rows.numel()
        assert batch.loss.selected_ids.shape == (0, 1 + K) and batch.loss.candidate_log_probs.shape == (0, K)
        assert batch.by_sample(torch.zeros(0)) == [] and batch.attention_mask().any(dim=2).all()


@pytest.mark.parametrize("rank", [-1, 2, 5])
@pytest.mark.parametrize("layout", [ContextLayout(f, g, 2) for f in ("thd", "bshd") for g in (False, True)])
def test_a_rank_of_another_group_is_refused(layout, rank):
    with pytest.raises(ValueError, match=f"rank {rank} in a context-parallel group of 2"):
        context_map([5, 3], [2, 1], layout, rank=rank)


@pytest.mark.parametrize("lengths", [([5.9, 3], [2, 1]), ([5, 3], [2.0, 1]), (["5", "3"], [2, 1])])
def test_lengths_are_whole_numbers(lengths):
    with pytest.raises(ValueError, match="give whole numbers of tokens"):
        context_map(*lengths, ContextLayout())


@pytest.mark.parametrize("layout", [ContextLayout(f, g, n) for f in ("thd", "bshd") for g in (False, True) for n in (1, 2, 3)])
def test_no_samples_are_one_row_of_padding(layout):
    for rank in range(layout.size):
        slots = context_map([], [], layout, rank=rank)
        assert slots.tokens.shape == (1, layout.tokens_per_rank([])) and (slots.tokens == -1).all() and not slots.rows.size
