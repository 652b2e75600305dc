"""The loop of one run: rollout -> train -> update weights, with evaluation, checkpoints and an orderly stop."""

import argparse
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from miles_sc.trainer.checkpoint import checkpoint_to_continue, new_checkpoint, run_settings, save_older_weights
from miles_sc.trainer.cluster import Actors
from miles_sc.trainer.progress import Progress
from miles_sc.trainer.run_directory import RunDirectory


class Interrupted(Exception):
    """The run stopped on request, at a rollout boundary, with a checkpoint."""


def train(args: argparse.Namespace, directory: RunDirectory, actors: Actors, stop: "StopRequests", *, title: str) -> None:
    """Runs or continues one arm to its end.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM; a checkpoint is there.
        ValueError, OSError: what went wrong, in one line.
    """
    checkpoint = checkpoint_to_continue(args)
    first = checkpoint.next_rollout if checkpoint else 0
    stop.check("stopped before the first rollout")
    stop.loading = True
    actors.prepare(args)
    stop.loading = False
    directory.start(first)
    with Progress(args.num_rollout, title=title) as progress:
        run = _Run(args, actors, directory, progress, run_settings(args))
        run.begin(checkpoint)
        run.loop(first, stop)


class _Run:
    def __init__(self, args, actors: Actors, directory: RunDirectory, progress: Progress, settings: dict[str, Any]) -> None:
        self.args, self.actors, self.directory, self.progress, self.settings = args, actors, directory, progress, settings
        # rollout t samples with version max(0, t - lag): the version number is how many rollouts it was trained on
        self.lag = args.rollout_staleness + int(args.train_async)
        self.versions: deque[tuple[int, Any]] = deque(maxlen=self.lag + 1)
        self.save_root = directory.checkpoints

    def begin(self, checkpoint) -> None:
        """Restores a checkpoint, or evaluates where the run starts from."""
        if checkpoint:
            self.actors.call_train("load", str(checkpoint.backend_directory))
            for version in range(max(0, checkpoint.next_rollout - self.lag), checkpoint.next_rollout):
                self.versions.append((version, ray.put(checkpoint.older_weights(version))))
        self._keep_weights(checkpoint.next_rollout if checkpoint else 0)
        if not checkpoint and self.args.eval_interval:
            self._record(-1, self._evaluate())

    def loop(self, first: int, stop: "StopRequests") -> None:
        args, pending = self.args, self._start_rollout(first)
        for number in range(first, args.num_rollout):
            started = time.perf_counter()
            try:
                rollout = ray.get(pending)
            except ray.exceptions.RayTaskError:
                if number > first:
                    self._save(number)  # the trainer's state is sound, only this rollout is not
                raise
            last = number + 1 == args.num_rollout
            if args.train_async and not last:
                pending = self._start_rollout(number + 1)
            train_metrics = self.actors.call_train("train", rollout.shards)[0]
            exported = time.perf_counter()
            self._keep_weights(number + 1)
            metrics = rollout.metrics | train_metrics | {"perf/update_weights_seconds": time.perf_counter() - exported}
            if args.eval_interval and (last or (number + 1) % args.eval_interval == 0):
                metrics |= self._evaluate()
            metrics["perf/step_seconds"] = time.perf_counter() - started
            self._record(number, metrics)
            due = args.save_interval and (number + 1) % args.save_interval == 0
            if due or last or stop.requested:
                self._save(number + 1)
            if last and args.save_hf:
                self._save_model(Path(args.save_hf))
            if stop.requested and not last:
                raise Interrupted(
                    f"stopped after rollout {number + 1} of {args.num_rollout}; continue with --load {self.save_root}"
                )
            if not args.train_async and not last:
                pending = self._start_rollout(number + 1)

    def _start_rollout(self, number: int) -> Any:
        version = max(0, number - self.lag)
        weights = dict(self.versions)[version]
        return self.actors.rollout.rollout.remote(number, weights, str(version))

    def _keep_weights(self, version: int) -> None:
        self.versions.append((version, self.actors.call_train("export_weights")[0][0]))

    def _evaluate(self) -> dict[str, float]:
        version, weights = self.versions[-1]
        return ray.get(self.actors.rollout.evaluate.remote(weights, str(version)))

    def _record(self, number: int, metrics: dict[str, float]) -> None:
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise ValueError(f"{broken[0]} is {metrics[broken[0]]} after rollout {number + 1}: the run has diverged; lower --lr")
        self.directory.record(number, metrics)
        self.progress.update({"step": number} | metrics)

    def _save(self, next_rollout: int) -> None:
        with new_checkpoint(self.save_root, next_rollout, settings=self.settings) as checkpoint:
            self.actors.call_train("save", str(checkpoint.backend_directory.resolve()))
            for version, weights in self.versions:
                if version < next_rollout:
                    save_older_weights(checkpoint, version, ray.get(weights))
        self.progress.note(f"checkpoint of {next_rollout} rollouts in {self.save_root}")

    def _save_model(self, directory: Path) -> None:
        version, weights = self.versions[-1]
        ray.get(self.actors.rollout.save_model.remote(weights, str(version), str(directory)))
        self.progress.note(f"trained model in {directory}")


class StopRequests:
    """Whether somebody asked the command to stop."""

    requested = False
    # nothing is lost before the first rollout
    loading = False

    def check(self, message: str) -> None:
        """Raises Interrupted if so."""
        if self.requested:
            raise Interrupted(message)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """The first Ctrl-C or SIGTERM asks for a stop at the next rollout boundary; the second, or one while a run is still being
    loaded, stops at once."""
    stop = StopRequests()

    def handle(number: int, frame: object) -> None:
        if stop.requested or stop.loading:
            raise KeyboardInterrupt
        stop.requested = True
        print("miles-sc: stopping after this rollout with a checkpoint; once more stops at once", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
