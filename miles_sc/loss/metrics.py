"""Per-token diagnostics of a step, reduced over micro-batches and data-parallel ranks."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from miles_sc.loss.batch import LossBatch
from miles_sc.parallel.groups import size_of

# A mean hides the one broken token; these get their worst case beside it.
_MIN = ("sc_train_head_mass", "sc_rollout_head_mass")
_MAX = ("sc_tail_ratio", "sc_importance_weight", "train_rollout_logprob_abs_diff")
_P99 = ("sc_tail_ratio", "sc_importance_weight", "train_rollout_logprob_abs_diff")


class StepMetrics:
    """Collects the token metrics of every micro-batch of a step; one reduction at its end."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}
        self._weights: list[Tensor] = []

    def add(self, token_metrics: Mapping[str, Tensor], batch: LossBatch) -> None:
        """Keeps the active rows' values, on the device."""
        self._weights.append(torch.where(batch.active, batch.weights, 0.0))
        for name, values in token_metrics.items():
            # inactive rows have weight 0, and may hold NaN
            self._rows.setdefault(name, []).append(torch.where(batch.active, values, 0.0))

    def reduce(self, group: dist.ProcessGroup | None = None, *, normalize: bool = False) -> dict[str, float]:
        """Means in proportion to the loss's own weights, and worst cases, over all ranks of ``group`` (None: this rank alone).

        ``sc_tail_ratio`` is taken over the tokens whose tail can be read. ``_p99`` is the worst rank's.
        Called once a step, it waits for the device. ``normalize``: the weights of a step do not sum to 1, as in a host.
        """
        weights = torch.cat(self._weights).double()
        rows = {name: torch.cat(values).double() for name, values in self._rows.items()}
        sums = {name: (weights * values).sum() for name, values in rows.items()} | {"_weight": weights.sum()}
        extremes: dict[str, Tensor] = {}
        if "sc_tail_ratio" in rows:
            readable = weights * (1 - rows["sc_tail_floor_fraction"])
            sums["sc_tail_ratio"], sums["_readable"] = (readable * rows["sc_tail_ratio"]).sum(), readable.sum()
            w = rows["sc_importance_weight"]
            counted = (weights > 0).double()
            sums["_w"], sums["_w2"], sums["_n"] = (counted * w).sum(), (counted * w * w).sum(), counted.sum()
        extremes = _extremes(rows, weights > 0)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        _all_reduce(extremes, dist.ReduceOp.MAX, group)
        values = dict(zip([*sums, *extremes], torch.stack([*sums.values(), *extremes.values()]).tolist(), strict=True))
        total = values.pop("_weight")
        total = (total or 1.0) if normalize else 1.0  # without a trained token every sum is 0
        return _finish({name: value / total if name in (*rows, "_readable") else value for name, value in values.items()})


def _extremes(rows: Mapping[str, Tensor], counted: Tensor) -> dict[str, Tensor]:
    """Worst cases of this rank as maxima; a minimum is carried as the maximum of its negative."""
    wanted = {f"{name}_min": -rows[name] for name in _MIN if name in rows}
    wanted |= {f"{name}_max": rows[name] for name in _MAX if name in rows}
    wanted |= {f"{name}_p99": rows[name] for name in _P99 if name in rows}
    nothing = counted.new_full((), -torch.inf, dtype=torch.float64)
    worst = {}
    for name, values in wanted.items():
        kept = values[counted]
        of_many = _percentile_99 if name.endswith("_p99") else torch.amax
        worst[name] = of_many(kept) if kept.numel() else nothing
    return worst


def _percentile_99(values: Tensor) -> Tensor:
    # torch.quantile stops at 16M elements
    return values.kthvalue(math.ceil(0.99 * values.numel())).values


def _all_reduce(values: dict[str, Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if not values or size_of(group) == 1:
        return
    packed = torch.stack(list(values.values()))
    dist.all_reduce(packed, op=op, group=group)
    values.update(zip(values, packed.unbind(), strict=True))


def _finish(values: dict[str, float]) -> dict[str, float]:
    if "_n" in values:
        readable, w, w2, n = (values.pop(name) for name in ("_readable", "_w", "_w2", "_n"))
        ratio = values.pop("sc_tail_ratio")
        if readable:  # a ratio that nobody could read is not recorded
            values["sc_tail_ratio"] = ratio / readable
        # Kish's effective sample size as a share of the tokens
        values["sc_ess"] = w * w / (n * w2) if n and w2 else 0.0
    for name, value in values.items():
        if name.endswith("_min"):
            values[name] = -value
        if name.endswith(("_min", "_max", "_p99")) and math.isinf(value):
            values[name] = 0.0  # a step without a trained token has no worst case either
    return values


def combine_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a rollout from those of its optimizer steps: means, and the worst of worst cases."""
    combined = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        if name.endswith("_min"):
            combined[name] = min(values)
        elif name.endswith(("_max", "_p99")):
            combined[name] = max(values)
        else:
            combined[name] = sum(values) / len(values)
    return combined
