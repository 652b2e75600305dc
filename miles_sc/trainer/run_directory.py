"""What a run leaves behind: its settings, one JSON line of metrics per rollout, TensorBoard events if asked for."""

import argparse
import json
import os
import tempfile
from pathlib import Path


class RunDirectory:
    """``run.json`` and ``metrics.jsonl`` of one arm under one seed."""

    def __init__(self, path: Path, args: argparse.Namespace, *, arm: str) -> None:
        self.path, self._args, self._arm = path, args, arm
        self._writer = None

    def check_writable(self) -> None:
        """Creates the directory and tries to write there.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise ValueError(f"--output-dir {self.path}: cannot be written ({error.strerror}); give a folder that can") from error

    def start(self, first_rollout: int) -> None:
        """Begins the records; a continued run drops those of rollouts that it will repeat."""
        metrics = self.path / "metrics.jsonl"
        kept = []
        if first_rollout and metrics.exists():
            # a killed run may have left half a line, of a rollout that no checkpoint holds
            lines = [line for line in metrics.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] < first_rollout]
        _write_whole(metrics, "".join(f"{line}\n" for line in kept))
        _write_whole(self.path / "run.json", json.dumps(self._description(), indent=2))
        if self._args.use_tensorboard:
            self._writer = _tensorboard_writer(self.path)

    def record(self, number: int, metrics: dict[str, float]) -> None:
        """Adds the line of a rollout; it is on the disk when this returns."""
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


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def _tensorboard_writer(path: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--use-tensorboard: tensorboard is not installed; pip install 'miles-sc[report]'") from error
    return SummaryWriter(str(path / "tensorboard"))
