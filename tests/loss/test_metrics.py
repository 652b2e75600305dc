"""A step's diagnostics: means with the loss's weights, worst cases, and their reduction over ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from miles_sc.loss.batch import LossBatch
from miles_sc.loss.metrics import StepMetrics, combine_steps
from miles_sc.loss.reduction import weighted_sum

NAN, INF = math.nan, math.inf
SC = (
    "sc_train_head_mass",
    "sc_rollout_head_mass",
    "sc_tail_ratio",
    "sc_importance_weight",
    "sc_tail_floor_fraction",
    "train_rollout_logprob_abs_diff",
)
EXTREMES = {
    "sc_train_head_mass_min",
    "sc_rollout_head_mass_min",
    "sc_tail_ratio_max",
    "sc_tail_ratio_p99",
    "sc_importance_weight_max",
    "sc_importance_weight_p99",
    "train_rollout_logprob_abs_diff_max",
    "train_rollout_logprob_abs_diff_p99",
}


def batch_of(weights, active):
    rows = len(weights)
    zeros = torch.zeros(rows)
    return LossBatch(
        torch.zeros(rows, 1, dtype=torch.long), torch.tensor(weights), torch.tensor(active, dtype=torch.bool), zeros, zeros
    )


def sc_metrics(**rows):
    rows = {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}
    length = len(next(iter(rows.values())))
    defaults = {name: torch.zeros(length, dtype=torch.float64) if "floor" in name else torch.ones(length).double() for name in SC}
    return defaults | rows


def reduced(*micro_batches, group=None):
    metrics = StepMetrics()
    for values, batch in micro_batches:
        metrics.add(values, batch)
    return metrics.reduce(group)


def test_means_carry_the_losss_own_weights_over_micro_batches():
    first = {"loss": torch.tensor([2.0, 4.0, NAN])}, batch_of([0.25, 0.25, 0.5], [1, 1, 0])
    second = {"loss": torch.tensor([8.0])}, batch_of([0.5], [1])
    assert reduced(first, second) == {"loss": pytest.approx(0.25 * 2 + 0.25 * 4 + 0.5 * 8)}
    total = sum(weighted_sum(values["loss"], batch) for values, batch in (first, second))
    assert total.item() == pytest.approx(reduced(first, second)["loss"])


def test_inactive_rows_are_in_no_mean_and_no_worst_case():
    values = sc_metrics(
        sc_train_head_mass=[0.9, NAN, 0.8],
        sc_tail_ratio=[1.5, INF, 2.5],
        sc_importance_weight=[1.0, 99.0, 3.0],
        train_rollout_logprob_abs_diff=[0.1, 99.0, 0.3],
    )
    got = reduced((values, batch_of([0.5, 0.5, 0.5], [1, 0, 1])))
    assert got["sc_train_head_mass"] == pytest.approx(0.85) and got["sc_train_head_mass_min"] == pytest.approx(0.8)
    assert got["sc_tail_ratio"] == pytest.approx(2.0) and got["sc_tail_ratio_max"] == 2.5
    assert got["sc_importance_weight_max"] == 3.0 and got["train_rollout_logprob_abs_diff_max"] == pytest.approx(0.3)


def test_names():
    assert reduced((sc_metrics(sc_tail_ratio=[1.0, 2.0]), batch_of([0.5, 0.5], [1, 1]))).keys() == {
        *SC,
        *EXTREMES,
        "sc_ess",
    }


def test_the_tail_ratio_is_taken_where_a_tail_can_be_read():
    values = sc_metrics(sc_tail_ratio=[3.0, 1.0, 2.0, 1.0], sc_tail_floor_fraction=[0, 1, 0, 1])
    got = reduced((values, batch_of([0.1, 0.4, 0.3, 0.2], [1, 1, 1, 1])))
    assert got["sc_tail_ratio"] == pytest.approx((0.1 * 3 + 0.3 * 2) / 0.4)
    assert got["sc_tail_floor_fraction"] == pytest.approx(0.6)


def test_a_step_without_a_readable_tail_records_no_ratio():
    values = sc_metrics(sc_tail_ratio=[1.0, 1.0], sc_tail_floor_fraction=[1, 1])
    unreadable = reduced((values, batch_of([0.5, 0.5], [1, 1])))
    assert "sc_tail_ratio" not in unreadable and unreadable["sc_tail_floor_fraction"] == 1
    assert combine_steps([unreadable, {**unreadable, "sc_tail_ratio": 5.0}])["sc_tail_ratio"] == 5.0


@pytest.mark.parametrize(
    "weights, expected", [([1.0, 1.0, 1.0, 1.0], 1.0), ([4.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 2.0, 1.0, 0.0], 2 / 3)]
)
def test_effective_sample_size_is_a_share_of_the_active_tokens(weights, expected):
    """Kish's (sum w)^2 / (n sum w^2); the row's share in the loss is not in it."""
    values = sc_metrics(sc_importance_weight=[*weights, 7.0])
    got = reduced((values, batch_of([0.1, 0.2, 0.3, 0.4, 0.5], [1, 1, 1, 1, 0])))
    assert got["sc_ess"] == pytest.approx(expected)


@pytest.mark.parametrize("rows, rank", [(1, 1), (50, 50), (100, 99), (250, 248)])
def test_the_99th_percentile_is_a_value_that_occurs(rows, rank):
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).double() + 1
    values = sc_metrics(sc_tail_ratio=shuffled.tolist())
    got = reduced((values, batch_of([1 / rows] * rows, [1] * rows)))
    assert (got["sc_tail_ratio_p99"], got["sc_tail_ratio_max"]) == (rank, rows)


@pytest.mark.parametrize("active", [[0, 0], []])
def test_a_step_without_a_trained_token_stays_finite(active):
    """Every response empty or masked: nothing to learn from, and no reason to call the run diverged."""
    rows = len(active)
    values = {name: torch.full((rows,), NAN, dtype=torch.float64) for name in (*SC, "loss")}
    got = reduced((values, batch_of([0.0] * rows, active)))
    assert got.keys() == {*SC, *EXTREMES, "sc_ess", "loss"} - {"sc_tail_ratio"}
    assert all(math.isfinite(value) for value in got.values()) and got["loss"] == 0


def test_ranks_reduce_to_what_one_rank_would_say(monkeypatch):
    """Two ranks in turn: the first call records what each puts in, the second gives both the reduced tensors."""
    first = sc_metrics(sc_tail_ratio=[1.0, 4.0], sc_train_head_mass=[0.9, 0.7]), batch_of([0.2, 0.3], [1, 1])
    second = sc_metrics(sc_tail_ratio=[2.0, 9.0], sc_train_head_mass=[0.8, 0.1]), batch_of([0.5, 0.0], [1, 0])
    whole = reduced(first, second)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    given = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: given.append((tensor.clone(), op)))
    apart = [reduced(first, group="both"), reduced(second, group="both")]
    assert [op for _, op in given] == [dist.ReduceOp.SUM, dist.ReduceOp.MAX] * 2
    combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
    sums, extremes = (combine[given[i][1]](given[i][0], given[i + 2][0]) for i in range(2))
    answers = iter([sums, extremes])
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: tensor.copy_(next(answers)))
    both = reduced(first, group="both")
    assert apart[0]["sc_tail_ratio"] != pytest.approx(whole["sc_tail_ratio"])
    assert both == {name: pytest.approx(value) for name, value in whole.items()}


def test_an_empty_micro_batch_of_one_rank_adds_nothing():
    empty = {name: values[:0] for name, values in sc_metrics(sc_tail_ratio=[1.0]).items()}, batch_of([], [])
    filled = sc_metrics(sc_tail_ratio=[2.0, 3.0]), batch_of([0.5, 0.5], [1, 1])
    assert reduced(filled, empty) == reduced(filled)


def test_steps_combine_to_means_and_the_worst_of_worst_cases():
    steps = [
        {"loss": 1.0, "sc_train_head_mass_min": 0.5, "sc_tail_ratio_max": 2.0, "sc_tail_ratio_p99": 1.5},
        {"loss": 4.0, "sc_train_head_mass_min": 0.2, "sc_tail_ratio_max": 1.0, "sc_tail_ratio_p99": 1.9},
    ]
    expected = {"loss": 2.5, "sc_train_head_mass_min": 0.2, "sc_tail_ratio_max": 2.0, "sc_tail_ratio_p99": 1.9}
    assert combine_steps(steps) == expected
    assert combine_steps(steps[:1]) == steps[0]
