"""Candidate scoring against log_softmax + gather: time and extra peak memory, forward and backward.

    python benchmarks/candidate_scoring.py [--rows 512] [--vocabulary 151936] [--candidates 128] [--dtype float32]

Every figure is a ratio within this run. Each contender runs in a process of its own, several times in turn with the
others, so that neither the allocator's history nor the machine's mood favours one. Memory is the growth of the peak
resident set over the live logits (CPU), or of the allocator's peak (CUDA).
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch


def log_softmax_gather(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What everybody writes first."""
    return torch.log_softmax(logits.float(), dim=-1).gather(1, ids)


def ours(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from miles_sc import selected_log_probs

    return selected_log_probs(logits, ids)


CONTENDERS: dict[str, Callable] = {"log_softmax + gather": log_softmax_gather, "selected_log_probs": ours}


class PeakMemory:
    """Growth of resident memory while a block runs, sampled every half millisecond; the allocator's own count on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __enter__(self) -> "PeakMemory":
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._before = self._peak = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, _resident_bytes())
            time.sleep(0.0005)

    def __exit__(self, *exception: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            self.extra = torch.cuda.max_memory_allocated() - self._before
            return
        self._stop.set()
        self._thread.join()
        self.extra = max(self._peak, _resident_bytes()) - self._before


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure(name: str, rows: int, vocabulary: int, candidates: int, dtype: str, repeats: int) -> dict[str, float]:
    """Median seconds and the extra peak of one contender, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    function = CONTENDERS[name]
    weights = torch.randn(rows, 1 + candidates, device=device)
    ids = torch.randint(0, vocabulary, (rows, 1 + candidates), device=device)
    # warm-up on other logits, small: kernels and threads start, nothing large stays in the allocator
    small = torch.randn(8, vocabulary, device=device, dtype=getattr(torch, dtype)).requires_grad_()
    (function(small * 1, ids[:8]) * weights[:8]).sum().backward()
    del small
    seconds, extra = [], []
    for _ in range(repeats):
        logits = torch.randn(rows, vocabulary, device=device).to(getattr(torch, dtype)).requires_grad_()
        with PeakMemory(device) as memory:
            started = time.perf_counter()
            (function(logits, ids) * weights).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        extra.append(memory.extra / (logits.numel() * logits.element_size()))
        del logits
    return {"seconds": statistics.median(seconds), "extra": max(extra)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = (args.rows, args.vocabulary, args.candidates, args.dtype, args.repeats)
    if args.one:
        print(json.dumps(measure(args.one, *shape)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--one", name]
            for flag in ("rows", "vocabulary", "candidates", "dtype", "repeats"):
                command += [f"--{flag}", str(getattr(args, flag))]
            results[name].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    base = results["log_softmax + gather"]
    print(f"{args.rows} x {args.vocabulary} {args.dtype}, K = {args.candidates}, forward + backward")
    print(f"{'':22} {'extra peak / logits':>20} {'time / log_softmax + gather':>28}")
    for name, rounds in results.items():
        extra = max(r["extra"] for r in rounds)
        ratio = statistics.median(r["seconds"] / b["seconds"] for r, b in zip(rounds, base, strict=True))
        print(f"{name:22} {extra:19.2f}x {ratio:27.2f}x")


if __name__ == "__main__":
    main()
