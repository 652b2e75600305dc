"""How the training ranks of a run are laid out: tensor x context x data."""

import argparse
import importlib.util

from miles_sc.parallel.context import ContextLayout


def context_layout(args: argparse.Namespace) -> ContextLayout:
    """How micro-batches lie over the context-parallel ranks."""
    return ContextLayout(args.qkv_format, args.allgather_cp, args.context_parallel_size)


def world_size(args: argparse.Namespace) -> int:
    """Training ranks: as asked for, or as few as the layout needs."""
    return args.actor_num_gpus_per_node or _model_ranks(args)


def engine_gpus(args: argparse.Namespace) -> int:
    """GPUs for the servers that the run launches, on a machine that has some."""
    launched = args.rollout_engine == "sglang" and not args.rollout_external_engine_addrs
    return args.rollout_num_engines * args.rollout_num_gpus_per_engine if launched else 0


def data_parallel_size(args: argparse.Namespace) -> int:
    """Ranks, or groups of ranks, that hold samples of their own."""
    return world_size(args) // _model_ranks(args)


def validate_layout(args: argparse.Namespace) -> None:
    """Refuses a layout that the backend has not, or that the ranks do not fill.

    Raises:
        ValueError: the flag, its value and what to set.
    """
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        size, flag = getattr(args, name), "--" + name.replace("_", "-")
        if size < 1:
            raise ValueError(f"{flag} {size}: set at least 1")
        if size != 1 and args.train_backend == "fsdp":
            raise ValueError(f"{flag} {size}: --train-backend fsdp is data-parallel; set 1, or --train-backend megatron")
    if args.train_backend not in ("megatron", "fsdp"):
        raise ValueError(f"--train-backend {args.train_backend}: choose megatron or fsdp")
    if args.train_backend == "megatron" and not _has_megatron_core():
        raise ValueError("--train-backend megatron: megatron-core is not installed; pip install 'megatron-core>=0.16'")
    context_layout(args)
    if world_size(args) % _model_ranks(args):
        raise ValueError(
            f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node} is no multiple of --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x --context-parallel-size {args.context_parallel_size}: set a multiple of "
            f"{_model_ranks(args)}"
        )


def _model_ranks(args: argparse.Namespace) -> int:
    return args.tensor_model_parallel_size * args.context_parallel_size


def _has_megatron_core() -> bool:
    # "megatron" is a namespace that other packages share
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None
