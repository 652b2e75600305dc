"""The actors of one run on Ray, and Ray itself."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
import torch

from miles_sc.trainer.rollout_actor import RolloutActor
from miles_sc.trainer.train_actor import TrainActor


@contextmanager
def ray_session() -> Iterator[None]:
    """A Ray of our own on this machine, for the length of a command."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


class Actors:
    """One rollout actor and the train actors, alive inside a ``with`` block; each run of a command takes them anew."""

    def __init__(self, world_size: int, *, overlapping: bool, engine_gpus: int = 0) -> None:
        """Args:
        world_size: train actors.
        engine_gpus: of the servers that the rollout actor will launch, where there are GPUs.
        overlapping: rollout and training run at once and share the cores; otherwise they take turns on all of them.
        """
        cores = os.cpu_count() or 1
        rollout_threads = max(cores // (world_size + 1), 1) if overlapping else cores
        train_threads = max(cores // (world_size + int(overlapping)), 1)
        train_gpus, rollout_gpus = _gpu_shares(world_size, engine_gpus)
        self.rollout = _spawn(RolloutActor, rollout_gpus, rollout_threads, rollout_threads)
        self._train = [
            _spawn(TrainActor, train_gpus, train_threads, rank, world_size, train_threads) for rank in range(world_size)
        ]
        self.call_train("join", ray.get(self._train[0].rendezvous_address.remote()))

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # an orderly end for what it launched, unless somebody is in a hurry: killed hard, its servers notice and end themselves
        with suppress(ray.exceptions.RayError):
            if kind is not KeyboardInterrupt:
                ray.get(self.rollout.close.remote(), timeout=30)
        for actor in (self.rollout, *self._train):
            ray.kill(actor)

    def prepare(self, args: argparse.Namespace) -> None:
        """Loads a run everywhere."""
        loading = self.rollout.prepare.remote(args)
        ray.get([loading, *(actor.prepare.remote(args) for actor in self._train)])

    def call_train(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on every rank and waits for all; results in the order of the ranks."""
        return ray.get([getattr(actor, method).remote(*arguments) for actor in self._train])


def _gpu_shares(world_size: int, engine_gpus: int) -> tuple[float, float]:
    """GPUs of a train actor and of the rollout actor, whose servers see what it sees: each its own, or an embedded sampler beside
    one rank where none is left."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if available == 0:
        return 0.0, 0.0
    if available < world_size + engine_gpus:
        servers = f" and {engine_gpus} of --rollout-num-engines x --rollout-num-gpus-per-engine" if engine_gpus else ""
        raise ValueError(
            f"--actor-num-gpus-per-node {world_size}{servers}: this machine has {available} GPUs; set at most {available} in all"
        )
    if engine_gpus:
        return 1.0, float(engine_gpus)
    # two shares of 0.6 never meet on one GPU, which NCCL would refuse; 0.4 fits beside one
    return (1.0, 1.0) if available > world_size else (0.6, 0.4)


def _spawn(kind: type, gpus: float, threads: int, *arguments: Any) -> Any:
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # threads that spin while they wait take the cores from the actor whose turn it is: 6x slower on a busy machine
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 1, "runtime_env": {"env_vars": environment}}
    return ray.remote(kind).options(**options).remote(*arguments)
