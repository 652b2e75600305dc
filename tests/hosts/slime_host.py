"""The real Slime, where it is installed: its parser, its Sample, its trainer's functions redirected to the CPU."""

import argparse
import copy
import importlib.util
import sys
from functools import cache
from unittest import mock

import pytest
import torch

from miles_sc.hosts import slime
from miles_sc.hosts.seams import HostSource


@cache
def source() -> HostSource | None:
    """What lies in this environment; None where that is no Slime."""
    found = importlib.util.find_spec("slime")
    if found is None or not found.submodule_search_locations:
        return None
    lying = HostSource(list(found.submodule_search_locations))
    return lying if lying.has(slime.HOST.entry) else None


@cache
def why_not() -> str:
    """Why the real Slime cannot be used here; empty where it can."""
    if source() is None:
        return "Slime is not installed in this environment"
    try:
        import slime.backends.megatron_utils.loss
        import slime.ray.rollout
        import slime.utils.arguments  # noqa: F401
    except ImportError as error:
        return f"Slime cannot be imported here: {error}"
    return ""


needs_source = pytest.mark.skipif(source() is None, reason="Slime is not installed in this environment")
needs_slime = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

RECIPE = ["--loss-type", "score_centering", "--rollout-top-logprobs-num", "4", "--use-rollout-logprobs"]


def parse(*given: str) -> argparse.Namespace:
    """What Slime's own functions make of a command line; their caller, ``parse_args``, needs a fork of Megatron."""
    from slime.utils import arguments

    command = ["--rollout-num-gpus", "1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4"]
    command += ["--num-rollout", "1", "--prompt-data", "prompts.jsonl", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "64"]
    command += ["--rollout-max-response-len", "16"]
    parser = argparse.ArgumentParser()
    with mock.patch.object(sys, "argv", ["train.py", *command, *given]):
        arguments.get_slime_extra_args_provider()(parser)
        run = parser.parse_known_args()[0]
        vars(run).update(vars(arguments._pre_parse_mode()))
    vars(run).update(sglang_server_concurrency=4, sglang_dp_size=1, sglang_router_ip="router", sglang_router_port=80)
    arguments.slime_validate_args(run)
    return run


@cache
def _recipe() -> argparse.Namespace:
    return parse(*RECIPE)


def run_of(**changes: object) -> argparse.Namespace:
    """The recipe's namespace, changed; with what Megatron's parser would add."""
    run = copy.copy(_recipe())
    vars(run).update({"allgather_cp": False, "vocab_size": None, "ci_test": False}, **changes)
    return run


def on_the_cpu() -> None:
    """Slime asks for an accelerator to put tensors on; for the rest of this process that is the CPU."""
    from slime.utils import accelerator

    accelerator.current_device = accelerator.device = lambda *_: torch.device("cpu")
