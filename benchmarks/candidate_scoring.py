"""Candidate scoring against log_softmax + gather and Megatron's cross entropy: time and extra peak memory.

    python benchmarks/candidate_scoring.py [--rows 512] [--vocabulary 151936] [--candidates 128] [--dtype float32]

Forward and backward. Megatron's vocab_parallel_cross_entropy scores one target and works over the logits, the floor of what
anything can cost; it is measured where megatron-core is installed. The second table is the growth of our own.

Every figure is a ratio within this run. Each contender runs in a process of its own, several times in turn with the
others, so that neither the allocator's history nor the machine's mood favours one. Memory is the growth of the peak
resident set over the live logits (CPU), or of the allocator's peak (CUDA).
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import torch


def log_softmax_gather(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What everybody writes first."""
    return torch.log_softmax(logits.float(), dim=-1).gather(1, ids)


def ours(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from miles_sc import selected_log_probs

    return selected_log_probs(logits, ids)


def ours_in_place(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from miles_sc import selected_log_probs

    return selected_log_probs(logits, ids, inplace_backward=True)


def responses(rows: int) -> np.ndarray:
    """Where the responses lie in a packed micro-batch: prompts of 16 tokens, responses of 48."""
    return np.flatnonzero(np.arange(rows) % 64 >= 16)


def ours_of_a_copy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from miles_sc import selected_log_probs

    chosen = torch.from_numpy(responses(len(logits))).to(logits.device)
    return selected_log_probs(logits[chosen], ids[chosen])


def ours_where_they_lie(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from miles_sc import selected_log_probs

    rows = responses(len(logits))
    return selected_log_probs(logits, ids[torch.from_numpy(rows).to(logits.device)], rows=rows)


def megatron(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One target a row, in place; a process group of one rank, as it asks for."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    if not torch.distributed.is_initialized():
        backend = "nccl" if logits.is_cuda else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return -vocab_parallel_cross_entropy(logits[:, None], ids[:, :1])


BASE, MEGATRON = "log_softmax + gather", "vocab_parallel_cross_entropy"
OURS, IN_PLACE = "selected_log_probs", "selected_log_probs, in place"
COPIED, IN_ROWS = "selected_log_probs(logits[rows])", "selected_log_probs(logits, rows=)"
WHOLE: dict[str, Callable] = {BASE: log_softmax_gather, MEGATRON: megatron, OURS: ours, IN_PLACE: ours_in_place}
CONTENDERS = WHOLE | {COPIED: ours_of_a_copy, IN_ROWS: ours_where_they_lie}


class _Head(torch.autograd.Function):
    """Stands for the model: logits that nothing else holds, whose gradient is used up at once."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, logits: list[torch.Tensor]) -> torch.Tensor:
        return logits.pop()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.new_zeros(()).float(), None


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
    """Fastest run and the extra peak, in logits, of one contender in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    function, anchor = CONTENDERS[name], torch.zeros((), device=device, requires_grad=True)
    weights = torch.randn(rows, 1 + candidates, device=device)
    ids = torch.randint(0, vocabulary, (rows, 1 + candidates), device=device)

    def run(logits: list[torch.Tensor]) -> None:
        scores = function(_Head.apply(anchor, logits), ids)
        (scores * weights[: len(scores), : scores.shape[1]]).sum().backward()

    # warm-up: kernels and threads start; the allocator gives a large block back
    run([torch.randn(rows, vocabulary, device=device).to(getattr(torch, dtype))])
    seconds, extra = [], []
    for _ in range(repeats):
        logits = torch.randn(rows, vocabulary, device=device).to(getattr(torch, dtype))
        size, box = logits.numel() * logits.element_size(), [logits]
        del logits
        with PeakMemory(device) as memory:
            started = time.perf_counter()
            run(box)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        extra.append(memory.extra / size)
    return {"seconds": min(seconds), "extra": max(extra)}


def in_own_process(name: str, **shape: object) -> dict[str, float]:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    for flag, value in shape.items():
        command += [f"--{flag}", str(value)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def compare(contenders: list[tuple[str, dict]], rounds: int) -> list[tuple[float, float]]:
    """Per contender the median ratio of its time to the first's, and its largest extra peak."""
    results = [[in_own_process(name, **shape) for name, shape in contenders] for _ in range(rounds)]
    return [
        (statistics.median(r[i]["seconds"] / r[0]["seconds"] for r in results), max(r[i]["extra"] for r in results))
        for i in range(len(contenders))
    ]


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
    shape = {name: getattr(args, name) for name in ("rows", "vocabulary", "candidates", "dtype", "repeats")}
    if args.one:
        print(json.dumps(measure(args.one, *shape.values())))
        return
    names = [name for name in WHOLE if name != MEGATRON or importlib.util.find_spec("megatron")]
    found = dict(zip(names, compare([(name, shape) for name in names], args.rounds), strict=True))
    threads = torch.get_num_threads()
    print(f"{args.rows} x {args.vocabulary} {args.dtype}, K = {args.candidates}, {threads} threads, forward + backward")
    print(f"{'':30} {'extra peak / logits':>20} {'time / log_softmax':>20} {'time / Megatron':>16}")
    for name, (time_ratio, extra) in found.items():
        to_megatron = f"{time_ratio / found[MEGATRON][0]:15.2f}x" if MEGATRON in found else f"{'-':>16}"
        print(f"{name:30} {extra:19.2f}x {time_ratio:19.2f}x {to_megatron}")

    print(f"\n{IN_PLACE}, growth")
    fewer = shape | {"candidates": args.candidates // 4}
    longer = shape | {"rows": 2 * args.rows}
    (_, _), (by_candidates, _) = compare([(IN_PLACE, fewer), (IN_PLACE, shape)], args.rounds)
    (_, before), (by_rows, after) = compare([(IN_PLACE, shape), (IN_PLACE, longer)], args.rounds)
    print(f"K {fewer['candidates']} -> {args.candidates}: time {by_candidates:.2f}x")
    print(f"T {args.rows} -> {longer['rows']}: time {by_rows:.2f}x, extra peak / logits {before:.2f}x -> {after:.2f}x")

    (_, copied), (in_rows, extra) = compare([(COPIED, shape), (IN_ROWS, shape)], args.rounds)
    print("\nresponses of 48 tokens after prompts of 16, in one packed row")
    print(f"{COPIED}: extra peak / logits {copied:.2f}x")
    print(f"{IN_ROWS}: extra peak / logits {extra:.2f}x, time / copy {in_rows:.2f}x")


if __name__ == "__main__":
    main()
