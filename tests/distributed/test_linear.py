"""Scoring from hidden states with the output weight on several ranks, against dense float64 logits."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miles_sc.loss import linear_log_probs as module
from miles_sc.loss.linear_log_probs import linear_selected_log_probs
from miles_sc.parallel.context import ContextLayout, context_map
from tests.distributed.launch import device, launch
from tests.loss.test_linear_log_probs import DEPTH, IDS, ROWS, close, cotangents, dense, differentiated, layer

# widths of the ranks -> cases of it
SPLITS = {
    (5, 5): {
        "whole": {},
        "padded": {"vocab_size": 9},
        "a rank of padding": {"vocab_size": 4},
        "rank boundary": {"vocab_size": 5},
    },
    (10, 0): {"an empty rank": {}},
    (3, 3, 3, 1): {"torch.chunk": {}, "temperature": {"temperature": 0.7, "chunk_size": 3}},
    (3, 3, 3, 3): {"padded": {"vocab_size": 10}, "a rank of padding": {"vocab_size": 8}},
}
CONTEXT_LAYOUTS = [ContextLayout(f, allgather, 2) for f in ("thd", "bshd") for allgather in (False, True)]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
FROZEN = ["nothing", "hidden", "weight"]
KEYS = [
    (widths, name, dtype, frozen)
    for widths, cases in SPLITS.items()
    for name in cases
    for dtype in DTYPES
    for frozen in (FROZEN if dtype == "float64" else FROZEN[:1])
]


@contextmanager
def counted_reductions():
    """``(operation, elements)`` of every all-reduce."""
    calls, all_reduce = [], dist.all_reduce

    def counting(tensor, op, group):
        calls.append(("max" if op == dist.ReduceOp.MAX else "sum", tensor.numel()))
        return all_reduce(tensor, op=op, group=group)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def sharded(widths, name, dtype, frozen, rank, group, rows=ROWS):
    """Scores, gradients and reductions of the rank that holds its columns of the layer."""
    options = SPLITS[widths][name]
    hidden, weight = layer(rows, width=sum(widths), dtype=DTYPES[dtype])
    hidden, weight = hidden.to(device(), copy=True), weight.split(widths)[rank].to(device(), copy=True)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    ids = torch.where(IDS < 0, IDS, IDS % options.get("vocab_size", 10))[:rows].to(device())
    with counted_reductions() as forward:
        scores = linear_selected_log_probs(hidden, weight, ids, group=group, **options)
    with counted_reductions() as backward:
        scores.backward(cotangents(ids.shape).to(scores))
    return scores.detach(), hidden.grad, weight.grad, forward, backward


def scored_by_ranks(weight, group):
    """Scores of every rank with its equal part of ``weight``, and of dense logits."""
    hidden, ids = layer()[0], IDS.clamp(max=9)
    hidden[:, 0] = 1.0
    part = weight.tensor_split(dist.get_world_size())[dist.get_rank()]
    scores = linear_selected_log_probs(hidden.to(device()), part.to(device()), ids.to(device()), group=group)
    return scores, dense(hidden, weight, ids)


def in_both_groups():
    """Two tensor-parallel ranks with half of the columns each, times two context-parallel ranks with rows of their own."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("context", "tensor"))
    results = {}
    for layout in CONTEXT_LAYOUTS:
        rows = torch.from_numpy(context_map([5, 3], [4, 2], layout, rank=mesh.get_local_rank("context")).response_rows)
        hidden, weight = layer(width=10)
        hidden = hidden[rows].to(device()).requires_grad_()
        weight = weight.chunk(2)[mesh.get_local_rank("tensor")].to(device(), copy=True).requires_grad_()
        ids = IDS.clamp(max=9)[rows].to(device())
        with counted_reductions() as calls:
            scores = linear_selected_log_probs(hidden, weight, ids, group=mesh.get_group("tensor"), vocab_size=10)
            scores.backward(cotangents()[rows].to(scores))
        results[layout] = (rows, scores.detach(), hidden.grad, weight.grad, len(calls))
    return mesh.get_coordinate(), results


def work():
    module.CPU_TILE = module.ACCELERATOR_TILE = (2, 2)
    rank, world = dist.get_rank(), dist.get_world_size()
    # equal vocabularies of different widths: a group knows one split of each
    groups = {widths: dist.new_group() for widths in SPLITS if len(widths) == world}
    results = {key: sharded(*key, rank, groups[key[0]]) for key in KEYS if key[0] in groups}
    widths = next(iter(groups))
    empty = sharded(widths, next(iter(SPLITS[widths])), "float64", "nothing", rank, groups[widths], rows=0)
    _, weight = layer(width=10)
    weight[: -(-10 // world), 0] = -torch.inf  # all that the first rank holds
    masked = scored_by_ranks(weight, dist.group.WORLD)
    weight[-1, 0] = torch.nan
    loud, _ = scored_by_ranks(weight, dist.group.WORLD)
    return results, empty, masked, loud, in_both_groups() if world == 4 else None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank of two and of four found."""
    return {world: launch(work, world, tmp_path_factory.mktemp("linear")) for world in (2, 4)}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: " ".join(map(str, key)))
def test_ranks_equal_dense(ranks, key):
    """Hidden's gradient is whole on every rank, the weight's is that of the rank's own rows."""
    widths, name, dtype, frozen = key
    options = {k: v for k, v in SPLITS[widths][name].items() if k != "chunk_size"}
    ids = torch.where(IDS < 0, IDS, IDS % options.get("vocab_size", 10))
    exact = layer(width=sum(widths), dtype=DTYPES[dtype])
    scores, hidden_gradient, weight_gradient = differentiated(partial(dense, token_ids=ids, **options), *exact, cotangents())
    tolerance = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 2**-5}[dtype]
    for rank, (results, *_) in enumerate(ranks[len(widths)]):
        actual = results[key]
        close(actual[0].double(), scores.double(), tolerance, tolerance)
        for got, wanted, is_frozen in (
            (actual[1], hidden_gradient, frozen == "hidden"),
            (actual[2], weight_gradient.split(widths)[rank], frozen == "weight"),
        ):
            assert (got is None) == is_frozen
            if not is_frozen:
                close(got.double(), wanted.double(), tolerance, tolerance)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: " ".join(map(str, key)))
def test_reductions_are_k_plus_3_numbers_a_row_and_one_hidden_row_backward(ranks, key):
    for results, *_ in ranks[len(key[0])]:
        *_, forward, backward = results[key]
        assert sorted(forward) == [("max", ROWS), ("sum", ROWS), ("sum", ROWS * IDS.shape[1])]
        assert backward == ([] if key[3] == "hidden" else [("sum", ROWS * DEPTH)])


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_without_rows_takes_part_in_every_reduction(ranks, world):
    for _, (scores, hidden_gradient, weight_gradient, forward, backward), *_ in ranks[world]:
        assert scores.shape == (0, 4) and hidden_gradient.shape == (0, DEPTH) and (weight_gradient == 0).all()
        assert (len(forward), len(backward)) == (3, 1)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_without_mass_is_quiet(ranks, world):
    for _, _, (scores, expected), *_ in ranks[world]:
        close(scores, expected)
        assert (scores == -torch.inf).any() and not scores.isnan().any()


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_not_a_number_on_one_rank_is_loud_on_all(ranks, world):
    for _, _, _, scores, _ in ranks[world]:
        assert scores[IDS >= 0].isnan().all() and (scores[IDS < 0] == 0).all()


@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS, ids=str)
def test_context_ranks_score_their_own_rows_and_their_weight_gradients_add_up(ranks, layout):
    ids = IDS.clamp(max=9)
    scores, hidden_gradient, weight_gradient = differentiated(partial(dense, token_ids=ids), *layer(width=10), cotangents())
    seen, summed = [], torch.zeros_like(weight_gradient)
    for *_, ((_, tensor_rank), results) in ranks[4]:
        rows, found, of_hidden, of_weight, calls = results[layout]
        close(found, scores[rows])
        close(of_hidden, hidden_gradient[rows])
        summed.chunk(2)[tensor_rank].add_(of_weight)
        seen += rows.tolist()
        assert calls == 4  # three forward, hidden's gradient backward, all over the tensor group
    close(summed, weight_gradient)
    assert sorted(seen) == sorted([*range(ROWS)] * 2)
