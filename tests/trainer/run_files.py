"""Runs as they lie on the disk, made up for tests."""

import json

REWARD_ARGS = {"task": "chain_sum", "lr": 1e-4, "rm_type": None, "rollout_mismatch": "int8", "rollout_staleness": 0}


def records(*, evals, rollouts=4, **metrics):
    """A constant value per metric in every rollout, evaluations ``{rollouts done: (reward, kl)}``."""
    rows = [{"step": step} | metrics for step in range(rollouts)]
    if 0 in evals:
        rows.insert(0, {"step": -1})
    for row in rows:
        if row["step"] + 1 in evals:
            row["eval/reward"], row["eval/kl_from_start"] = evals[row["step"] + 1]
    return rows


def write_run(directory, rows, *, arm="score_centering", seed=42, kind="reward", rollouts=4, **args):
    directory.mkdir(parents=True, exist_ok=True)
    described = {"arm": arm, "seed": seed, "kind": kind, "rollouts": rollouts}
    described["args"] = REWARD_ARGS | {"rollout_seed": seed, "output_dir": str(directory)} | args
    (directory / "run.json").write_text(json.dumps(described))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_drift_run(directory, *, kl, reward="constant:1", **others):
    rows = records(evals={0: (1.0, 0.0), 4: (1.0, kl)}, **{"rollout/reward": 1.0})
    write_run(directory, rows, kind="drift", rm_type=reward, **others)
