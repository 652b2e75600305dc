"""The score_centering loss on two tensor- and two context-parallel ranks: the same in every layout as with none at all."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miles_sc import ScoreCenteringConfig
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.data.sharding import shard
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import loss_function
from miles_sc.loss.metrics import StepMetrics
from miles_sc.loss.scoring import full_vocabulary_log_probs
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import rank_in
from tests.distributed.dense import BOUNDS, ENTROPY_COEF, KL_COEF, TEMPERATURE, Rows, dense_step, rows_of
from tests.distributed.launch import device, launch
from tests.distributed.rollouts import LENGTHS, train_data

VOCAB, COLUMNS, K, CP, TP = 37, 40, 5, 2, 2
PLACES = 16  # more than the longest sample has, padded
CPU = torch.device("cpu")
# its only response row lies in the second half and in the last of four chunks: one context rank has none, in every layout
ONE_ROW, NO_RESPONSE = ((7, 1),), ((3, 0), (5, 0))


@dataclasses.dataclass(frozen=True)
class Case:
    """kl: as in :func:`tests.distributed.dense.dense_step`; lengths: prompt and response of every sample."""

    layout: ContextLayout
    importance: str
    filtered: bool
    kl: str
    dtype: torch.dtype
    lengths: tuple = LENGTHS

    def __str__(self) -> str:
        cut = "allgather" if self.layout.allgather else "zigzag"
        names = [self.layout.qkv_format, cut, self.importance, "filtered" if self.filtered else "", self.kl, str(self.dtype)[6:]]
        return " ".join(name for name in names if name)

    @property
    def options(self) -> dict:
        return {"filtered": self.filtered, "entropy": self.importance == "tis", "kl": self.kl}

    @property
    def per_token(self) -> bool:
        return self.importance != "mis"


LAYOUTS = [ContextLayout(fmt, allgather, CP) for fmt in ("thd", "bshd") for allgather in (False, True)]
CASES = [
    Case(layout, importance, filtered, kl, dtype)
    for layout in LAYOUTS
    for importance in ("none", "tis", "mis")
    for filtered, kl in ((False, ""), (True, ""), (True, "unbiased k2"), (False, "k3"))
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
]
ONE_ROW_CASES, NO_RESPONSE_CASES = (
    [
        Case(layout, "tis", filtered, kl, torch.float32, lengths)
        for layout in LAYOUTS
        for filtered, kl in ((False, ""), (True, "k3"))
    ]
    for lengths in (ONE_ROW, NO_RESPONSE)
)
EQUAL = [
    Case(layout, "none", filtered, kl, dtype)
    for layout in LAYOUTS
    for filtered, kl in ((False, "k3"), (True, "unbiased k2"))
    for dtype in (torch.float32, torch.bfloat16)
]


# --- the model: logits are a row of a table by token, plus one by position


@cache
def tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, COLUMNS, dtype=torch.float64, generator=generator)
    table[:, VOCAB:] += 6  # padding that somebody counts is noticed
    places = 0.7 * torch.randn(PLACES, COLUMNS, dtype=torch.float64, generator=generator)
    held = torch.float64 if dtype == torch.float64 else torch.float32
    return table.to(held), places.to(held)


@cache
def rollout(filtered: bool, lengths: tuple):
    data = train_data(vocab_size=VOCAB, k=K, filtered=filtered, lengths=lengths, seed=2)
    if lengths == LENGTHS:
        data["ref_log_probs"][3][1] = -60.0  # a token so far away that it counts as broken
    return data


def model_of(case: Case, tensor_rank: int):
    """This rank's columns of the table, as a parameter, and of the places."""
    width = COLUMNS // TP
    mine = slice(tensor_rank * width, (tensor_rank + 1) * width)
    table, places = (values[:, mine].to(device(), copy=True) for values in tables(case.dtype))
    return table.requires_grad_(), places


def settings_of(case: Case, tensor_group) -> LossSettings:
    config = ScoreCenteringConfig(
        top_logprobs_num=K,
        importance_sampling=case.importance,
        temperature=TEMPERATURE,
        top_k=K if case.filtered else -1,
        **BOUNDS,
    )
    return LossSettings(
        score_centering=config,
        entropy_coef=ENTROPY_COEF if case.options["entropy"] else 0.0,
        use_kl_loss=bool(case.kl),
        kl_loss_coef=KL_COEF if case.kl else 0.0,
        kl_loss_type=(case.kl or "k3").split()[-1],
        use_unbiased_kl=case.kl.startswith("unbiased"),
        vocab_size=VOCAB,
        tensor_parallel_group=tensor_group,
    )


def micro_batches(case: Case, data, context_rank: int):
    """Those of one optimizer step; the last one is empty."""
    batch = {"world_size": 1, "global_batch_size": len(case.lengths), "per_token": case.per_token, "max_tokens": 12}
    (part,) = shard(data, layout=case.layout, **batch)
    for members in [*part.steps[0], []]:
        yield members, build_micro_batch(part.data, members, device(), pad_token_id=0, layout=case.layout, rank=context_rank)


# --- on the ranks


def step(case: Case, mesh) -> dict:
    context, tensor = mesh.get_group("context"), mesh.get_group("tensor")
    table, places = model_of(case, rank_in(tensor))
    settings, guard, metrics = settings_of(case, tensor), FiniteGuard(), StepMetrics()
    losses, counts = [], []
    for _, micro in micro_batches(case, rollout(case.filtered, case.lengths), rank_in(context)):
        logits = (table[micro.input_ids] + places[micro.position_ids]).to(case.dtype).flatten(0, 1)[micro.rows]
        guard.watch(micro.describe)
        output = loss_function("score_centering")(micro.loss, logits, settings, guard)
        output.loss.backward()
        losses.append(output.loss.detach())
        counts.append(len(micro.rows))
        metrics.add(output.token_metrics, micro.loss)
    guard.raise_if_tripped()
    alone, loss, gradient = table.grad.clone(), sum(losses), table.grad
    dist.all_reduce(loss, group=context)
    dist.all_reduce(gradient, group=context)
    return {
        "loss": loss.cpu(), "gradient": gradient.cpu(), "alone": alone.cpu(), "counts": counts,
        "metrics": metrics.reduce(context),
    }  # fmt: skip


def step_beside_itself(case: Case, mesh) -> tuple[float, float, int]:
    """Largest KL from the very model that the references were scored by, broken tokens, and rows."""
    context, tensor = mesh.get_group("context"), mesh.get_group("tensor")
    table, places = model_of(case, rank_in(tensor))
    settings, data, found = settings_of(case, tensor), dict(rollout(case.filtered, case.lengths)), []

    def logits_of(micro):
        return (table[micro.input_ids] + places[micro.position_ids]).to(case.dtype).flatten(0, 1)[micro.rows]

    (part,) = shard(data, world_size=1, global_batch_size=len(case.lengths), per_token=True, max_tokens=12, layout=case.layout)
    scored = [None] * len(case.lengths)
    build = {"pad_token_id": 0, "layout": case.layout, "rank": rank_in(context)}
    for members in part.steps[0]:
        micro = build_micro_batch(part.data, members, device(), **build)
        log_probs = full_vocabulary_log_probs(logits_of(micro), micro.loss, settings).detach()
        for member, values in zip(members, micro.by_sample(log_probs), strict=True):
            scored[member] = values  # NaN where the other context rank has the row
    part.data["ref_log_probs"] = scored
    for members in part.steps[0]:
        micro = build_micro_batch(part.data, members, device(), **build)
        output = loss_function("score_centering")(micro.loss, logits_of(micro), settings, FiniteGuard())
        found.append(torch.stack([output.token_metrics[name] for name in ("kl_loss", "kl_invalid_fraction")]))
    kl, broken = torch.cat(found, dim=1)
    return kl.abs().max().item(), broken.sum().item(), len(kl)


def work():
    mesh = init_device_mesh(device().type, (CP, TP), mesh_dim_names=("context", "tensor"))
    steps = {case: step(case, mesh) for case in CASES}
    steps |= {case: step(case, mesh) for case in ONE_ROW_CASES + NO_RESPONSE_CASES}
    return {"steps": steps, "equal": {case: step_beside_itself(case, mesh) for case in EQUAL}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(work, CP * TP, tmp_path_factory.mktemp("layouts"))


# --- what they must come to


@cache
def written_out(importance, filtered, kl, dtype, lengths):
    """(dense step, gradient of the table, bound on its bf16 rounding), all ``[VOCAB, VOCAB]`` in float64."""
    case = Case(LAYOUTS[0], importance, filtered, kl, dtype, lengths)
    rows: Rows = rows_of(rollout(filtered, lengths), per_token=case.per_token)
    table, places = tables(dtype)
    logits = (table[rows.before] + places[rows.places]).to(dtype)[:, :VOCAB]
    dense = dense_step(logits, rows, importance, **case.options)
    gradient, size = (
        torch.zeros(VOCAB, VOCAB, dtype=torch.float64).index_add(0, rows.before, values)
        for values in (dense.gradient, dense.size)
    )
    return dense, gradient, size


def expected(case):
    return written_out(case.importance, case.filtered, case.kl, case.dtype, case.lengths)


def whole_table(ranks, case, context_rank):
    """[VOCAB, COLUMNS] from the tensor-parallel ranks beside each other."""
    return torch.cat([ranks[context_rank * TP + t]["steps"][case]["gradient"] for t in range(TP)], dim=1)


@pytest.mark.parametrize("case", CASES + ONE_ROW_CASES, ids=str)
def test_loss_and_gradient_are_the_sums_over_tokens(ranks, case):
    dense, gradient, size = expected(case)
    tolerance = 1e-13 if case.dtype == torch.float64 else 2e-6
    # the logits' gradient is rounded to bf16 once for each term and once for their sum
    rounding = 3 * 2**-9 * size if case.dtype == torch.bfloat16 else torch.zeros_like(size)
    assert gradient.abs().max() > 1e-2
    for rank in range(CP * TP):
        assert ranks[rank]["steps"][case]["loss"].item() == pytest.approx(dense.loss.item(), abs=tolerance), rank
    for context_rank in range(CP):
        error = (whole_table(ranks, case, context_rank)[:, :VOCAB] - gradient).abs()
        assert (error <= rounding + tolerance).all(), error.max()


@pytest.mark.parametrize("case", CASES + ONE_ROW_CASES, ids=str)
def test_metrics_are_the_means_over_tokens(ranks, case):
    tolerance = {"abs": 1e-12 if case.dtype == torch.float64 else 2e-6, "rel": 1e-12 if case.dtype == torch.float64 else 1e-5}
    for rank in range(CP * TP):
        assert ranks[rank]["steps"][case]["metrics"] == pytest.approx(expected(case)[0].metrics, **tolerance), rank


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_of_the_vocabulary_has_no_gradient_at_all(ranks, case):
    for context_rank in range(CP):
        assert not whole_table(ranks, case, context_rank)[:, VOCAB:].any()


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_equal_models_have_a_kl_of_exactly_zero_in_every_layout(ranks, case):
    results = [rank["equal"][case] for rank in ranks]
    assert [result[:2] for result in results] == [(0.0, 0.0)] * len(ranks)
    assert sum(rows for *_, rows in results) == TP * sum(response for _, response in LENGTHS)


@pytest.mark.parametrize("case", ONE_ROW_CASES, ids=str)
def test_a_context_rank_without_a_row_has_a_graph_and_a_gradient_of_zero(ranks, case):
    counts = [sum(rank["steps"][case]["counts"]) for rank in ranks]
    assert sorted(counts) == [0, 0, 1, 1] and counts[0] == counts[1]
    for rank, count in zip(ranks, counts, strict=True):
        assert rank["steps"][case]["alone"].any() == bool(count)


@pytest.mark.parametrize("case", NO_RESPONSE_CASES, ids=str)
def test_samples_without_any_response_have_a_loss_and_a_gradient_of_zero(ranks, case):
    for rank in ranks:
        result = rank["steps"][case]
        assert result["loss"] == 0 and not result["gradient"].any() and sum(result["counts"]) == 0
        assert all(np.isfinite(value) for value in result["metrics"].values())


@pytest.mark.parametrize("importance", ["tis", "mis"])
@pytest.mark.parametrize("filtered", [False, True])
def test_the_rollout_clips_some_weights_and_leaves_others(importance, filtered):
    """Guards the cases above: every branch is taken, and every context rank has rows of most samples."""
    dense, *_ = written_out(importance, filtered, "k3", torch.float64, LENGTHS)
    assert 0.1 < dense.metrics["sc_weight_clipped_fraction"] < 0.9
    assert 0 < dense.metrics["kl_invalid_fraction"] < 0.2
    assert filtered or 0.3 < dense.metrics["sc_sampled_in_head"] < 0.95
