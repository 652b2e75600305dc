"""What the numbers of a report say, in plain words."""

from collections import Counter
from collections.abc import Sequence

from miles_sc.trainer.run_records import ABS_DIFF, EVAL_KL, EVAL_REWARD, Run, Series

# mean |log p - log q| per token under which sampler and trainer are the same for all that training notices
_NEAR_ON_POLICY = 1e-3


def summary(series: Sequence[Series]) -> str:
    """One paragraph: held-out reward from first to last, whether the seeds tell the arms apart, mismatch, drift."""
    reward = [each for each in series if each.kind == "reward"]
    drift = [each for each in series if each.kind == "drift"]
    return " ".join([*_reward_sentences(reward), *_mismatch_sentences(reward), *_drift_sentences(drift)])


def notes(runs: Sequence[Run], series: Sequence[Series]) -> list[str]:
    """What a reader should know before trusting the numbers."""
    found = []
    for run in runs:
        if run.recorded < run.rollouts:
            recorded = f"{run.recorded} of {run.rollouts} rollouts"
            found.append(f"{run.arm}, seed {run.seed} recorded {recorded}; its last values are earlier ones.")
        if run.broken:
            broken = ", ".join(run.broken)
            found.append(f"{run.arm}, seed {run.seed} recorded NaN or infinity, left out here: {broken}.")
    for each in series:
        counts = Counter(run.seed for run in each.runs)
        twice = [str(seed) for seed, count in counts.items() if count > 1]
        if twice:
            found.append(f"{each.label} has seed {', '.join(twice)} more than once: its spread is not one over seeds.")
    if any(each.kind == "reward" and each.condition.lag for each in series):
        found.append("The sampler was stale in some runs. Score centering takes out drift, it does not cure staleness.")
    return found


def _reward_sentences(series: Sequence[Series]) -> list[str]:
    if not series:
        return []
    evaluated = [each for each in series if each.last(EVAL_REWARD)]
    if not evaluated:
        return ["No held-out reward was recorded: these runs do not say whether the policy became better."]
    ends = [(each.label, each.first(EVAL_REWARD).text(".3f"), each.last(EVAL_REWARD).text(".3f")) for each in evaluated]
    changes = "; ".join(f"{label} {first} to {last}" for label, first, last in ends) + _seeds(evaluated, EVAL_REWARD)
    spread = ", ± standard deviation over seeds" if "±" in changes else ""
    return [
        f"Held-out reward of the clean policy (greedy), first to last evaluation{spread}: {changes}.",
        *_comparison(evaluated),
    ]


def _comparison(series: Sequence[Series]) -> list[str]:
    """Whether the last evaluation tells the best arm from the others."""
    if len(series) < 2:
        return []
    if len({each.condition for each in series}) > 1:
        return ["The samplers differ between these runs, so read each against the others with the same sampler."]
    best = max(series, key=lambda each: each.last(EVAL_REWARD).mean)
    ahead = best.last(EVAL_REWARD)
    if any(each.last(EVAL_REWARD).seeds < 2 for each in series):
        return ["With a single seed an arm's lead cannot be told from chance."]
    close = [each.label for each in series if each is not best and each.last(EVAL_REWARD).high >= ahead.low]
    if close:
        names = ", ".join(close)
        return [f"{best.label} has the highest mean, but seeds overlap with those of {names}: no difference is shown."]
    others = "every seed of the other arms" if len(series) > 2 else "every seed of the other arm"
    return [f"Every seed of {best.label} ends above {others} ({ahead.seeds} seeds: a sign, not a proof)."]


def _mismatch_sentences(series: Sequence[Series]) -> list[str]:
    measured = [(each, difference) for each in series if (difference := each.mean(ABS_DIFF))]
    if not measured:
        return []
    values = [difference.mean for _, difference in measured]
    sentence = f"Sampler and trainer differ by {_range(values)} nats per sampled token on average"
    if max(values) < _NEAR_ON_POLICY:
        return [f"{sentence}: nearly on-policy, where score centering has next to nothing to subtract."]
    return [f"{sentence}."]


def _drift_sentences(series: Sequence[Series]) -> list[str]:
    measured = [each for each in series if each.last(EVAL_KL)]
    if not series:
        return []
    if not measured:
        return ["The drift runs recorded no KL from the start, so they do not say how far the policy drifted."]
    biased = [each for each in measured if not each.condition.on_policy]
    unbiased = [each for each in measured if each.condition.on_policy]
    ends = [f"with a sampler that differs, at {_ends(biased)}"] if biased else []
    ends += [f"with the unbiased sampler, the noise floor, at {_ends(unbiased)}"] if unbiased else []
    return [
        "Under a constant reward the true gradient is zero: the clean policy's KL from its start is drift and noise. "
        f"In nats per token it ended, {'; '.join(ends)}{_seeds(measured, EVAL_KL)}."
    ]


def _ends(series: Sequence[Series]) -> str:
    """Each arm's last KL from the start; the range of it over conditions where there are several."""
    ends: dict[str, list[float]] = {}
    for each in series:
        ends.setdefault(each.label, []).append(each.last(EVAL_KL).mean)
    return ", ".join(f"{label} {_range(values)}" for label, values in ends.items())


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _seeds(series: Sequence[Series], name: str) -> str:
    """How many recorded the metric, for the end of a sentence that reports their mean."""
    counts = sorted({each.last(name).seeds for each in series})
    if counts == [1]:
        return " (one seed each)" if len(series) > 1 else " (one seed)"
    number = " to ".join(map(str, sorted({counts[0], counts[-1]})))
    return f" ({number} seeds{' each' if len(series) > 1 else ''})"
