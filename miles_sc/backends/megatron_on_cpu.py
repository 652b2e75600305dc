"""Megatron-Core on a machine without CUDA, over gloo. Does nothing where CUDA is there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Inside the block, what Megatron-Core asks of CUDA is answered by the CPU.

    It names the device "cuda" in tensor constructors, pins memory, waits for streams, compares ``tensor.type()`` with CUDA
    names and keeps CUDA random states. There is one device and no stream here, and no dropout that would draw from a state.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random

    answers = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    with ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        patches.enter_context(mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()))
        patches.enter_context(mock.patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: None))
        patches.enter_context(mock.patch.object(random, "_set_cuda_rng_state", lambda *args, **kwargs: None))
        patches.enter_context(_CudaMeansCpu())
        yield


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result
