"""The real Miles, where it is installed: its parser, its Sample, its trainer's functions redirected to the CPU."""

import argparse
import copy
import importlib.util
import sys
from functools import cache
from unittest import mock

import pytest
import torch


@cache
def why_not() -> str:
    """Why the real Miles cannot be used here; empty where it can."""
    if importlib.util.find_spec("miles") is None:
        return "Miles is not installed in this environment"
    try:
        import miles.backends.training_utils.loss  # noqa: F401
        import miles.utils.arguments  # noqa: F401
    except ImportError as error:
        return f"Miles cannot be imported here: {error}"
    return ""


needs_miles = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

RECIPE = ["--loss-type", "score_centering", "--rollout-top-logprobs-num", "4", "--advantage-estimator", "grpo"]


def parse(*flags: str, model: str | None = None) -> argparse.Namespace:
    """What Miles's own ``parse_args`` makes of a command line on the FSDP backend, which needs no fork of Megatron."""
    from miles.utils.arguments import parse_args

    command = ["train.py", "--train-backend", "fsdp", "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1"]
    command += ["--rollout-num-gpus", "1", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
    command += ["--global-batch-size", "8", "--num-rollout", "1", "--prompt-data", "prompts.jsonl"]
    if model is not None:
        command += ["--hf-checkpoint", model]
    with mock.patch.object(sys, "argv", command + list(flags)):
        return parse_args()


@cache
def _recipe() -> argparse.Namespace:
    return parse(*RECIPE)


def run_of(**changes: object) -> argparse.Namespace:
    """The recipe's namespace, changed; with what the Megatron backend's parser would add."""
    run = copy.copy(_recipe())
    vars(run).update({"allgather_cp": False, "vocab_size": None, "qkv_format": "thd", "enable_witness": False}, **changes)
    return run


def on_the_cpu() -> None:
    """Miles's trainer asks CUDA where to put a tensor; for the rest of this process the answer is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
