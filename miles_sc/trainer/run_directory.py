"""What a run leaves behind: its settings, one JSON line of metrics per rollout, TensorBoard events if asked for."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from miles_sc.trainer.checkpoint import checkpoints
from miles_sc.trainer.files import write_whole


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
        """Creates the directory and makes sure that a new run mixes with no other.

        Raises:
            ValueError: it cannot be written, or holds another run.
        """
        if not self._args.load:
            self._part_from_other_runs()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"--output-dir {self.path}: cannot be written ({error.strerror}); give a folder that can") from error

    def _part_from_other_runs(self) -> None:
        others = [path for path in (self.path / "metrics.jsonl", *checkpoints(self.checkpoints)) if path.exists()]
        if others and not self._args.overwrite:
            raise ValueError(
                f"--output-dir {self.path}: {others[0]} belongs to another run; continue it with --load "
                f"{self.checkpoints}, replace it with --overwrite, or choose another folder"
            )
        for path in others:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def start(self, first_rollout: int) -> None:
        """Begins the records; a continued run drops those of rollouts that it will repeat."""
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
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": number} | metrics) + "\n")
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
