"""Scoring from hidden states against a head with logits and cross_entropy: time and extra peak memory, forward and backward.

    python benchmarks/linear_scoring.py [--rows 512] [--vocabulary 151936] [--many-rows 4096] [--small-vocabulary 32768]

Every figure is a ratio within this run, but for the memory that does not grow. Each contender runs in a process of its own,
several times in turn with the others, so that neither the allocator's history nor the machine's mood favours one. Memory is
the growth of the peak resident set (CPU), or of the allocator's peak (CUDA), beyond the gradients of hidden and weight.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from candidate_scoring import PeakMemory


class Run(NamedTuple):
    contender: str
    rows: int
    vocabulary: int
    candidates: int
    hidden: int
    dtype: str
    repeats: int
    threads: int


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """The loss of the sampled token alone, with logits."""
    return torch.nn.functional.cross_entropy(hidden @ weight.T, ids[:, 0])


def ours(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    from miles_sc.loss.linear_log_probs import linear_selected_log_probs

    return (linear_selected_log_probs(hidden, weight, ids) * upstream).sum()


BASE, OURS = "matmul + cross_entropy", "linear_selected_log_probs"
CONTENDERS: dict[str, Callable] = {BASE: cross_entropy, OURS: ours}


def measure(run: Run) -> dict[str, float]:
    """Fastest run and the extra peak in bytes of one contender, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(run.threads)
    torch.manual_seed(0)
    function, dtype = CONTENDERS[run.contender], getattr(torch, run.dtype)
    hidden = torch.randn(run.rows, run.hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(run.vocabulary, run.hidden, device=device) / run.hidden**0.5).to(dtype).requires_grad_()
    ids = torch.randint(0, run.vocabulary, (run.rows, 1 + run.candidates), device=device)
    upstream = torch.randn(ids.shape, device=device)
    # warm-up on a few rows and columns: kernels and threads start, nothing large stays in the allocator
    few = [hidden[:8].detach().requires_grad_(), weight[:1024].detach().requires_grad_(), ids[:8] % 1024, upstream[:8]]
    function(*few).backward()
    seconds, extra = [], []
    for _ in range(run.repeats):
        with PeakMemory(device) as memory:
            started = time.perf_counter()
            function(hidden, weight, ids, upstream).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        extra.append(memory.extra - hidden.grad.nbytes - weight.grad.nbytes)
        hidden.grad = weight.grad = None
    return {"seconds": min(seconds), "extra": max(extra)}


def in_turn(runs: list[Run], rounds: int) -> dict[Run, list[dict[str, float]]]:
    results: dict[Run, list[dict[str, float]]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run, measured in results.items():
            command = [sys.executable, __file__, "--one", json.dumps(run)]
            measured.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--many-rows", type=int, default=4096)
    parser.add_argument("--small-vocabulary", type=int, default=32768, help="of the growth with the rows, which keeps logits")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--few-candidates", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 where the machine has other work")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Run(*json.loads(args.one)))))
        return

    def run(contender: str, rows: int, vocabulary: int, candidates: int = args.candidates) -> Run:
        return Run(contender, rows, vocabulary, candidates, args.hidden, args.dtype, args.repeats, args.threads)

    shapes = [
        (args.rows, args.vocabulary),
        (args.rows, args.small_vocabulary),
        (args.many_rows, args.small_vocabulary),
    ]
    fewer = run(OURS, *shapes[0], args.few_candidates)
    results = in_turn([run(name, *shape) for shape in shapes for name in CONTENDERS] + [fewer], args.rounds)

    def time_ratio(one: Run, other: Run) -> float:
        pairs = zip(results[one], results[other], strict=True)
        return statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)

    def extra(one: Run) -> float:
        return max(r["extra"] for r in results[one])

    print(
        f"hidden {args.hidden}, {args.dtype}, K = {args.candidates}, {args.threads} threads, forward + backward; "
        "memory beyond the gradients"
    )
    print(f"{'rows x vocabulary':18} {'':26} {'extra peak / logits':>20} {'extra peak':>12} {'time / matmul + CE':>20}")
    for shape in shapes:
        logits = shape[0] * shape[1] * getattr(torch, args.dtype).itemsize
        for name in CONTENDERS:
            one = run(name, *shape)
            figures = f"{extra(one) / logits:19.2f}x {extra(one) / 2**20:9.0f} MB {time_ratio(one, run(BASE, *shape)):19.2f}x"
            print(f"{f'{shape[0]} x {shape[1]}':18} {name:26} {figures}")
    print(f"K = {args.candidates} over K = {args.few_candidates}: time {time_ratio(run(OURS, *shapes[0]), fewer):.2f}x")
    growth = time_ratio(run(OURS, *shapes[2]), run(OURS, *shapes[1]))
    print(f"{args.many_rows} rows over {args.rows} ({args.many_rows / args.rows:g}x): time {growth:.2f}x")


if __name__ == "__main__":
    main()
