"""Tests of the loss. Under ``TRITON_INTERPRET=1`` they run candidate scoring on the Triton kernels, in Triton's interpreter."""

import importlib
import os


def score_on_interpreted_kernels() -> None:
    """CPU tensors of the kernels' dtypes are scored by them, in this process and, since spawned ranks import this, in theirs."""
    from miles_sc.loss import triton_scoring

    module = importlib.import_module("miles_sc.loss.selected_log_probs")
    chosen = module._kernel

    def kernel(logits, shard, temperature, chunk_size):
        if triton_scoring.is_available(logits):
            return triton_scoring.TritonKernel(shard, temperature)
        return chosen(logits, shard, temperature, chunk_size)

    module._kernel = kernel


if os.environ.get("TRITON_INTERPRET") == "1":
    score_on_interpreted_kernels()
