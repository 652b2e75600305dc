"""What a run leaves behind: its settings, one JSON line of metrics per rollout, TensorBoard events if asked for."""

import argparse
import json
import os
import shutil
from pathlib import Path

from miles_sc.trainer.checkpoint import checkpoints
from miles_sc.trainer.files import check_free, check_writable, write_whole


class RunDirectory:
    """``run.json`` and ``metrics.jsonl`` of one arm under one seed."""

    def __init__(self, path: Path, args: argparse.Namespace, *, arm: str) -> None:
        self.path, self._args, self._arm = path, args, arm
        self._writer = None

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints go."""
        return Path(self._args.save) if self._args.save else self.path / "checkpoints"

    def claim(self) -> None:
        """Creates the directories and makes sure that a new run mixes with no other. Nothing is removed yet.

        Raises:
            ValueError: a place that cannot be written, or that holds another run.
        """
        check_writable(self.path, "--output-dir")
        if self._args.save:
            check_writable(self.checkpoints, "--save")
        if self._args.save_hf:
            check_free(Path(self._args.save_hf))
            check_writable(Path(self._args.save_hf).absolute().parent, "--save-hf")
        others = self._other_runs()
        replaceable = self._args.overwrite and not self._args.save
        if others and not replaceable:
            raise ValueError(
                f"--output-dir {self.path}: {others[0]} belongs to another run; continue it with --load {self.checkpoints}, "
                "replace it with --overwrite (which leaves a --save of your own alone), or choose another folder"
            )

    def _other_runs(self) -> list[Path]:
        """What an earlier run left here, unless this one continues it."""
        continued = self._args.load and Path(self._args.load).resolve() == self.checkpoints.resolve()
        left = (self.path / "metrics.jsonl", *checkpoints(self.checkpoints))
        return [] if continued else [path for path in left if path.exists()]

    def start(self, first_rollout: int) -> None:
        """Begins the records, in the place of those that ``--overwrite`` gave up; a continued run drops what it will repeat."""
        for path in () if first_rollout else self._other_runs():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        metrics = self.path / "metrics.jsonl"
        kept = []
        if first_rollout and metrics.exists():
            # a killed run may have left half a line, of a rollout that no checkpoint holds
            lines = [line for line in metrics.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] < first_rollout]
        write_whole(metrics, "".join(f"{line}\n" for line in kept))
        write_whole(self.path / "run.json", json.dumps(self._description(), indent=2))
        if self._args.use_tensorboard:
            self._writer = _tensorboard_writer(self.path)

    def record(self, number: int, metrics: dict[str, float]) -> None:
        """Adds the line of a rollout, which is in the file when this returns."""
        path = self.path / "metrics.jsonl"
        whole = path.stat().st_size
        try:
            with path.open("a") as file:
                file.write(json.dumps({"step": number} | metrics) + "\n")
        except OSError:
            os.truncate(path, whole)  # half a line would spoil the file for every reader
            raise
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, number + 1)
            self._writer.flush()

    def _description(self) -> dict[str, object]:
        constant = str(self._args.rm_type or "").startswith("constant:")
        return {
            "arm": self._arm,
            "seed": self._args.rollout_seed,
            "kind": "drift" if constant else "reward",
            "rollouts": self._args.num_rollout,
            "args": vars(self._args),
        }


def _tensorboard_writer(path: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--use-tensorboard: tensorboard is not installed; pip install 'miles-sc[report]'") from error
    return SummaryWriter(str(path / "tensorboard"))
