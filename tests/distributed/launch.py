"""Real processes for a test: gloo on the CPU, or NCCL with ``MILES_SC_TEST_CUDA=1`` and a GPU for each."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CUDA = os.environ.get("MILES_SC_TEST_CUDA") == "1"


def device() -> torch.device:
    """Of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def needs(ranks: int) -> None:
    """Skips where the CUDA variant is asked for and the machine has too few GPUs."""
    if CUDA and torch.cuda.device_count() < ranks:
        pytest.skip(f"MILES_SC_TEST_CUDA=1 with {torch.cuda.device_count()} GPUs; this test wants {ranks}")


def launch(work: Callable, ranks: int, folder: Path, *arguments: object) -> list:
    """``work(*arguments)`` in every one of ``ranks`` processes of a default group; their results in order."""
    needs(ranks)
    mp.spawn(_process, args=(ranks, str(folder), work, arguments), nprocs=ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False, map_location="cpu") for rank in range(ranks)]


def _process(rank: int, ranks: int, folder: str, work: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # a rank that fails alone must not leave the others waiting for the default half hour
    dist.init_process_group(
        "nccl" if CUDA else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    try:
        torch.save(work(*arguments), f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
