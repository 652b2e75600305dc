"""What runs left behind, read back: a run per directory, and the runs of one arm under several seeds as one series."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

EVAL_REWARD = "eval/reward"
EVAL_KL = "eval/kl_from_start"
TRAIN_REWARD = "rollout/reward"
ABS_DIFF = "train/train_rollout_logprob_abs_diff"
ROLLOUT_KL = "train/train_rollout_kl"
TRAIN_MASS = "train/sc_train_head_mass"
ROLLOUT_MASS = "train/sc_rollout_head_mass"
TAIL_RATIO = "train/sc_tail_ratio"
TAIL_FLOOR = "train/sc_tail_floor_fraction"
ESS = "train/sc_ess"
TOKENS_PER_SECOND = "perf/rollout_tokens_per_second"
STEP_SECONDS = "perf/step_seconds"

# two runs that differ in these alone are the same experiment
_NO_SETTINGS = {
    "rollout_seed", "num_rollout", "output_dir", "save", "save_interval", "load", "eval_interval", "compare",
    "compare_seeds", "custom_config_path", "use_tensorboard", "command",
}  # fmt: skip
# the orders in which people compare; others follow
_ARMS = ("policy_loss", "tis", "mis", "score_centering", "score_centering+tis", "score_centering+mis")
_MISMATCHES = ("none", "int8", "int4")
# what a drift panel holds fixed
_CONDITION = ("rm_type", "rollout_mismatch", "rollout_staleness", "train_async")


@dataclass(frozen=True)
class Condition:
    """What surrounds the loss: the sampler, and the constant reward of a drift run.

    Attributes:
        reward: the constant; None where the task has a real reward.
        mismatch: how the sampler's weights differ from the trainer's, as ``--rollout-mismatch`` says it.
        lag: updates by which the sampler's weights are older than the trainer's.
    """

    reward: float | None
    mismatch: str
    lag: int

    @property
    def sampler(self) -> str:
        """How the sampler differs from the trainer, in words."""
        mismatch = [] if self.mismatch == "none" else [self.mismatch]
        lag = [f"{self.lag} update{'s' if self.lag > 1 else ''} stale"] if self.lag else []
        return ", ".join(mismatch + lag) or "unbiased"

    @property
    def on_policy(self) -> bool:
        """Whether the sampler is the trainer's own policy."""
        return self.mismatch == "none" and self.lag == 0

    @property
    def order(self) -> tuple:
        """Sorts positive rewards first, and samplers from the trainer's own policy away."""
        return (-(self.reward or 0), self.lag, _place(self.mismatch, _MISMATCHES), self.mismatch)


@dataclass(frozen=True)
class Run:
    """One arm under one seed.

    Attributes:
        directory: holds ``run.json`` and ``metrics.jsonl``.
        kind: ``reward`` or ``drift``.
        rollouts: how many were asked for; an interrupted run recorded fewer.
        args: the settings, by flag name with underscores.
        records: by step, ascending.
    """

    directory: Path
    arm: str
    seed: int
    kind: str
    rollouts: int
    args: Mapping[str, Any]
    records: Sequence[Mapping[str, float]]

    @property
    def recorded(self) -> int:
        """Rollouts that left a record."""
        return sum(record["step"] >= 0 for record in self.records)

    @property
    def condition(self) -> Condition:
        args = self.args
        reward = _constant_reward(args.get("rm_type")) if self.kind == "drift" else None
        lag = int(args.get("rollout_staleness") or 0) + int(bool(args.get("train_async")))
        return Condition(reward, str(args.get("rollout_mismatch") or "none"), lag)

    @property
    def broken(self) -> list[str]:
        """Metrics that are NaN or infinite in some record; they have a gap there."""
        names = (name for record in self.records for name, value in record.items() if not math.isfinite(value))
        return sorted(set(names))

    def curve(self, name: str) -> dict[int, float]:
        """A metric over the number of rollouts done, 0 being before any training. What is absent or NaN is left out."""
        return {
            int(record["step"]) + 1: record[name]
            for record in self.records
            # where no token's tail can be read, the ratio recorded is a placeholder
            if math.isfinite(record.get(name, math.nan)) and not (name == TAIL_RATIO and record.get(TAIL_FLOOR) == 1)
        }


@dataclass(frozen=True)
class Band:
    """A metric over the number of rollouts done: mean, least and greatest over the seeds that recorded it there."""

    rollouts: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Spread:
    """A number over seeds; ``deviation`` is the sample standard deviation, None for a single seed."""

    mean: float
    deviation: float | None
    low: float
    high: float
    seeds: int

    def text(self, form: str) -> str:
        """``mean ± deviation``, the mean formatted by ``form``."""
        mean = f"{self.mean:{form}}".removesuffix(".")
        return mean if self.deviation is None else f"{mean} ± {self.deviation:{form if form.endswith('f') else '.1g'}}"


@dataclass(frozen=True)
class Series:
    """The runs of one arm under one setting, a seed each.

    ``label`` is the arm, and what sets it apart from other series of the same arm.
    """

    label: str
    runs: Sequence[Run] = field(repr=False)

    @property
    def kind(self) -> str:
        return self.runs[0].kind

    @property
    def condition(self) -> Condition:
        return self.runs[0].condition

    def band(self, name: str) -> Band | None:
        """Over rollouts; None where no seed recorded it."""
        curves = [curve for run in self.runs if (curve := run.curve(name))]
        if not curves:
            return None
        rollouts = sorted(set().union(*curves))
        values = [[curve[at] for curve in curves if at in curve] for at in rollouts]
        mean, low, high = (np.array([of(row) for row in values]) for of in (statistics.fmean, min, max))
        return Band(np.array(rollouts), mean, low, high)

    def first(self, name: str) -> Spread | None:
        """Each seed's first value."""
        return self._over_seeds(name, lambda values: values[0])

    def last(self, name: str) -> Spread | None:
        """Each seed's last value."""
        return self._over_seeds(name, lambda values: values[-1])

    def mean(self, name: str) -> Spread | None:
        """Each seed's mean over its rollouts."""
        return self._over_seeds(name, statistics.fmean)

    def median(self, name: str) -> Spread | None:
        """Each seed's median over its rollouts."""
        return self._over_seeds(name, statistics.median)

    def _over_seeds(self, name: str, of) -> Spread | None:
        values = [of(list(curve.values())) for run in self.runs if (curve := run.curve(name))]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return Spread(statistics.fmean(values), deviation, min(values), max(values), len(values))


def read_runs(output_dir: Path) -> list[Run]:
    """Every run at or below ``output_dir``, by path.

    Raises:
        ValueError: no run there, none that recorded anything, or what cannot be read; file, line and remedy are named.
    """
    runs = [_read_run(path.parent) for path in sorted(output_dir.rglob("run.json"))]
    if not runs:
        raise ValueError(f"{output_dir}: no run there or below (a folder with run.json); give the --output-dir of a training run")
    if not any(run.records for run in runs):
        raise ValueError(f"{output_dir}: no rollout is recorded yet; ask again after the first one")
    return runs


def series_of(runs: Sequence[Run]) -> list[Series]:
    """Runs that differ in nothing but their seed, together; tasks first, then drift by condition, then by arm."""
    of_arm: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        of_arm.setdefault((run.kind, run.arm), []).append(run)
    found = []
    for same_arm in of_arm.values():
        differing = _differing(same_arm)
        groups: dict[tuple[str, ...], list[Run]] = {}
        for run in same_arm:
            groups.setdefault(tuple(_text(run.args.get(name)) for name in differing), []).append(run)
        found += [Series(_label(group[0], differing), group) for group in groups.values()]
    return sorted(found, key=_order)


def flag(name: str) -> str:
    """A setting as one types it."""
    return "--" + name.replace("_", "-")


def _order(series: Series) -> tuple:
    drift = series.kind == "drift"
    loss, _, candidates = series.runs[0].arm.partition("@")
    count = int(candidates) if candidates.isdecimal() else 0
    return (drift, series.condition.order if drift else (), _place(loss, _ARMS), loss, count, series.label)


def _place(name: str, usual: Sequence[str]) -> int:
    return usual.index(name) if name in usual else len(usual)


def _label(run: Run, differing: Sequence[str]) -> str:
    # a drift panel's title tells its condition
    names = [name for name in differing if not (run.kind == "drift" and name in _CONDITION)]
    return " ".join([run.arm, *(f"{flag(name)} {_text(run.args.get(name))}" for name in names)])


def _differing(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.args if name not in _NO_SETTINGS)
    return [name for name in names if len({_text(run.args.get(name)) for run in runs}) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _constant_reward(rm_type: Any) -> float:
    return float(str(rm_type).removeprefix("constant:"))


def _read_run(directory: Path) -> Run:
    path = directory / "run.json"
    remedy = f"run it again, or move {directory} away"
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}{_line_of(error)}: cannot be read ({_reason(error)}); {remedy}") from error
    kinds = {"arm": str, "seed": int, "kind": str, "rollouts": int, "args": dict}
    for name, kind in kinds.items():
        if not isinstance(described, dict) or not isinstance(described.get(name), kind):
            raise ValueError(f"{path}: no {name!r} of type {kind.__name__} in it; {remedy}")
    if described["kind"] not in ("reward", "drift"):
        raise ValueError(f"{path}: kind {described['kind']!r} is neither 'reward' nor 'drift'; {remedy}")
    args = {name.lstrip("-").replace("-", "_"): value for name, value in described.pop("args").items()}
    head = {name: described[name] for name in kinds if name != "args"}
    run = Run(directory, args=args, records=_read_records(directory / "metrics.jsonl"), **head)
    try:
        run.condition  # noqa: B018  its numbers must be numbers
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: rm_type or rollout_staleness is no number ({error}); {remedy}") from error
    return run


def _read_records(path: Path) -> list[dict[str, float]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        remedy = f"run it again, or move {path.parent} away"
        raise ValueError(f"{path}: cannot be read ({_reason(error)}); {remedy}") from error
    records: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = _checked_record(json.loads(line))
            if record["step"] in records:
                raise ValueError(f"step {record['step']} is there twice")
        except ValueError as error:
            remedy = "remove that line, or run it again; if the run is still writing, ask again"
            raise ValueError(f"{path} line {number}: no record of a rollout ({_reason(error)}); {remedy}") from error
        records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def _checked_record(record: Any) -> dict[str, float]:
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it holds no object with a whole-numbered step")
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, not a number")
    return record


def _line_of(error: Exception) -> str:
    return f" line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
