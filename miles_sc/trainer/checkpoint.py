"""Checkpoints of a run: complete or not there at all, and enough to continue to the bit."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from miles_sc.trainer.files import whole_directory, write_whole

_NAME = re.compile(r"step_(\d+)")

# What a continued run may change without becoming another run; everything else must be as it was.
_MAY_CHANGE = {
    "command", "num_rollout", "eval_interval", "save_interval", "output_dir", "save", "load", "save_hf", "overwrite",
    "use_tensorboard", "custom_config_path", "compare", "compare_seeds", "ci_test", "rollout_num_engines",
    "rollout_num_gpus_per_engine", "rollout_external_engine_addrs", "sglang_python", "sglang_server_args", "sglang_router",
    "update_weights_by", "sglang_server_concurrency", "rollout_request_timeout", "rollout_start_timeout",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Attributes:
    directory: holds the backend's sharded state, ``trainer.json`` and the older weights that a stale sampler still needs.
    next_rollout: the first rollout that is not in it.
    """

    directory: Path
    next_rollout: int

    @property
    def backend_directory(self) -> Path:
        """Where the train actors keep their state."""
        return self.directory / "backend"

    def older_weights(self, version: int) -> dict[str, np.ndarray]:
        """Weights of an earlier version that the sampler had not left yet."""
        return load_file(self.directory / f"weights_{version}.safetensors")


@contextmanager
def new_checkpoint(root: Path, next_rollout: int, *, settings: Mapping[str, object]) -> Iterator[Checkpoint]:
    """Gives a directory to fill; it takes its final name only when the block ends well, and vanishes otherwise.

    Args:
        settings: what a continued run must repeat to be the same run.
    """
    with whole_directory(root / f"step_{next_rollout:06d}", replace=True) as unfinished:
        yield Checkpoint(unfinished, next_rollout)
        write_whole(unfinished / "trainer.json", json.dumps({"next_rollout": next_rollout, "settings": dict(settings)}, indent=2))


def save_older_weights(checkpoint: Checkpoint, version: int, weights: Mapping[str, np.ndarray]) -> None:
    """Keeps an earlier version of the weights in a checkpoint that is being written."""
    save_file(dict(weights), checkpoint.directory / f"weights_{version}.safetensors")


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints below ``root``."""
    return [path for path in root.glob("step_*") if _NAME.fullmatch(path.name) and (path / "trainer.json").is_file()]


def newest_checkpoint(root: Path, *, settings: Mapping[str, object]) -> Checkpoint:
    """The newest complete checkpoint below ``root``.

    Raises:
        ValueError: there is none, or it was written under other settings, which are named.
    """
    found = checkpoints(root)
    if not found:
        raise ValueError(f"--load {root}: no checkpoint there; give the directory that --save named, or leave --load out")
    newest = max(found, key=lambda path: int(_NAME.fullmatch(path.name).group(1)))
    try:
        saved = json.loads((newest / "trainer.json").read_text())
        next_rollout, earlier = int(saved["next_rollout"]), dict(saved["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--load {newest}: trainer.json is damaged; remove this checkpoint, or name another folder") from error
    changed = [name for name, value in settings.items() if earlier.get(name) != value]
    if changed:
        name = changed[0]
        flag, was, now = "--" + name.replace("_", "-"), saved["settings"].get(name), settings[name]
        raise ValueError(
            f"--load {newest}: it was written with {flag} = {was!r} and this run has {now!r}; continue with the same value, or "
            "start a new run"
        )
    return Checkpoint(newest, next_rollout)


def checkpoint_to_continue(args: argparse.Namespace) -> Checkpoint | None:
    """What ``--load`` names, None without it. Reads one small file; to be asked before any process starts.

    Raises:
        ValueError: nothing there, written under other settings, or already at the end.
    """
    if not args.load:
        return None
    checkpoint = newest_checkpoint(Path(args.load), settings=run_settings(args))
    if checkpoint.next_rollout >= args.num_rollout:
        raise ValueError(
            f"--load {args.load}: it already holds {checkpoint.next_rollout} rollouts and --num-rollout is {args.num_rollout}; "
            "raise it"
        )
    return checkpoint


def run_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What a continued run must repeat to be the same run."""
    settings = {name: value for name, value in vars(args).items() if name not in _MAY_CHANGE}
    for name in ("hf_checkpoint", "ref_load", "prompt_data"):
        settings[name] = settings[name] and str(Path(settings[name]).resolve())
    return settings
