"""The drift walk: training on a constant reward, where the right answer is known beforehand.

    python examples/drift_walk.py --hf-checkpoint MODEL --task spell_backward [--output-dir runs/drift_walk]

The true gradient of a constant reward is zero, so whatever moves the clean trainer policy is sampling noise, which the
unbiased sampler shows (the floor), or drift: the pull of a sampler that differs from the trainer. Every arm walks from the
same model through the real pipeline (rollout, Ray, FSDP2, weight sync) with plain SGD; the distance is the KL from the
start, on held-out prompts, over the full vocabulary. Ends with a table and a report.
"""

import argparse
import json
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

from miles_sc.cli import main as miles_sc
from miles_sc.trainer.report import write_report
from miles_sc.trainer.run_records import read_runs

SAMPLERS = {
    "unbiased": [],
    "noise": ["--rollout-mismatch", "noise:0.1"],
    "int8": ["--rollout-mismatch", "int8"],
    "int4": ["--rollout-mismatch", "int4"],
    "stale": ["--rollout-staleness", "16"],
}
REWARDS = ("1", "-1")
QUICK_ARMS = ["policy_loss", "score_centering@128"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR")
    parser.add_argument("--task", required=True, metavar="NAME")
    parser.add_argument("--task-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output-dir", default="runs/drift_walk", metavar="DIR")
    parser.add_argument("--num-rollout", type=int, default=20, metavar="N")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--arms", help="as --compare of miles-sc train (default: all of them)")
    parser.add_argument("--quick", action="store_true", help="one seed, one reward, two arms: the panel of the quick start")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.samplers, args.rewards, args.arms = 1, ["unbiased", "noise"], ["-1"], ",".join(QUICK_ARMS)
    for directory, command in commands(args):
        print(f"--- {directory.name}", flush=True)
        if status := miles_sc([*command, "--output-dir", str(directory)]):
            raise SystemExit(status)
        for checkpoints in directory.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)  # hundreds of short runs, of which only the distances matter
        print_distances(directory)
    print(f"report: {write_report(Path(args.output_dir))}")


def arms(args: argparse.Namespace, sampler: str) -> str:
    """Plain policy gradient, its weights, centering at several K and with the full vocabulary, and both together."""
    if args.arms:
        return args.arms
    vocabulary = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())["vocab_size"]
    whole = f"score_centering@{vocabulary}"
    if sampler == "unbiased":
        return f"policy_loss,{whole}"  # the floor; weights are 1 here
    centered = [f"score_centering@{k}" for k in (8, 32, 128) if k < vocabulary]
    both = [f"score_centering+{weight}@{vocabulary}" for weight in ("tis", "mis")]
    return ",".join(["policy_loss", "tis", "mis", *centered, whole, *both])


def commands(args: argparse.Namespace) -> Iterator[tuple[Path, list[str]]]:
    """One comparison per sampler and reward, with the directory that it fills."""
    for sampler in args.samplers:
        for reward in args.rewards:
            command = ["train", "--hf-checkpoint", args.hf_checkpoint, "--task", args.task]
            for option in args.task_option:
                command += ["--task-option", option]
            command += ["--rm-type", f"constant:{reward}", "--disable-rewards-normalization", "--calculate-per-token-loss"]
            command += ["--num-rollout", str(args.num_rollout), "--rollout-batch-size", "16", "--n-samples-per-prompt", "8"]
            command += ["--rollout-max-response-len", "16", "--rollout-top-logprobs-num", "128", "--eval-interval", "5"]
            command += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
            command += ["--optimizer", "sgd", "--lr", str(args.lr), "--clip-grad", "0"]
            command += ["--compare", arms(args, sampler), "--compare-seeds", str(args.seeds), *SAMPLERS[sampler]]
            yield Path(args.output_dir) / f"{sampler}_{reward}", [*command, "--overwrite"]


def print_distances(directory: Path) -> None:
    """Last KL from the start of each arm: mean and range over seeds, in nats per token."""
    distances: dict[str, list[float]] = {}
    for run in read_runs(directory):
        last = [record["eval/kl_from_start"] for record in run.records if "eval/kl_from_start" in record][-1]
        distances.setdefault(run.arm, []).append(last)
    for arm, values in distances.items():
        print(f"{directory.name:16} {arm:24} {statistics.mean(values):10.5f}  ({min(values):.5f} .. {max(values):.5f})")


if __name__ == "__main__":
    main()
