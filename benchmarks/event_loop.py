"""How long answers hold up the event loop: longest gap while many arrive at once, beside reading them on the loop itself.

    python benchmarks/event_loop.py [--answers 64] [--tokens 512] [--candidates 128] [--forms b64 flat nested]

A server in a process of its own sends the same answer to every call. While the calls are under way a task sleeps 1 ms at a
time, and the gaps between its turns are the figures; a gap above 1 ms by itself ("nothing") is the machine's. Contenders
take turns over the rounds; seconds are medians, gaps the worst of all rounds. Full collections of the garbage collector stop
every thread, and are counted.
"""

import argparse
import asyncio
import base64
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
import torch  # noqa: F401  what a rollout process holds, and the garbage collector walks
import transformers  # noqa: F401

from miles_sc.rollout.answer import GeneratedTokens, read_generated_tokens
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient

FORMS = ("b64", "flat", "nested")
REQUEST = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0}}
STUB = Path(__file__).parents[1] / "tests" / "rollout" / "stub_server.py"


class Figures(NamedTuple):
    seconds: float
    gaps: list[float]
    collections: int


def answer(form: str, args: argparse.Namespace) -> bytes:
    """An answer with random candidates, as the engine writes it in this form."""
    random = np.random.default_rng(0)
    shape = (args.tokens, args.candidates)
    ids = np.stack([random.choice(args.vocabulary, args.candidates, replace=False) for _ in range(args.tokens)]).astype(np.int32)
    logits = -np.sort(-2 * random.standard_normal(shape), axis=1)
    log_probs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) - 0.02).astype(np.float32)
    meta: dict[str, Any] = {
        "output_token_logprobs": [[v, i, None] for v, i in zip(log_probs[:, 0].tolist(), ids[:, 0].tolist(), strict=True)],
        "completion_tokens": args.tokens,
        "finish_reason": {"type": "length", "length": args.tokens},
        "weight_version": "1",
    }
    if form == "nested":
        rows = zip(log_probs.tolist(), ids.tolist(), strict=True)
        meta["output_top_logprobs"] = [[[v, i, None] for v, i in zip(*row, strict=True)] for row in rows]
    else:
        meta.update(output_top_logprobs_shape=shape, output_top_logprobs_null_prefix=0)
        for name, array in (("val", log_probs), ("idx", ids)):
            field = f"output_top_logprobs_{name}_flat"
            if form == "flat":
                meta[field] = array.ravel().tolist()
            else:
                meta[f"{field}_b64"] = base64.b64encode(array.tobytes()).decode()
                meta[f"{field}_b64_dtype"] = array.dtype.name
    return orjson.dumps({"text": "", "output_ids": ids[:, 0].tolist(), "meta_info": meta})


def reader(args: argparse.Namespace) -> Callable[[dict[str, Any]], GeneratedTokens]:
    return lambda answer: read_generated_tokens(answer["meta_info"], k=args.candidates, vocab_size=args.vocabulary)


@contextmanager
def served(body: bytes) -> Iterator[str]:
    """Address of a server that gives this answer."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        process = subprocess.Popen([sys.executable, str(STUB), file.name], stdout=subprocess.PIPE, text=True)
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
            process.wait()


async def on_the_loop(url: str, args: argparse.Namespace) -> Figures:
    """The same HTTP library; each answer is parsed and read where it arrives."""
    read = reader(args)
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:

        async def call() -> GeneratedTokens:
            response = await http.post(f"{url}/generate", json=REQUEST)
            return read(orjson.loads(response.content))

        return await measured(call, args.answers)


async def in_the_client(url: str, args: argparse.Namespace) -> Figures:
    client = EngineClient(url, ClientSettings(max_connections=args.answers))
    read = reader(args)
    try:
        return await measured(lambda: client.ask("/generate", REQUEST, read), args.answers)
    finally:
        await client.close()


async def nothing(url: str, args: argparse.Namespace) -> Figures:
    return await measured(lambda: asyncio.sleep(1.0), 1)


async def measured(call: Callable[[], Awaitable[Any]], count: int) -> Figures:
    """Runs a few calls to warm up, then all together."""
    await asyncio.gather(*(call() for _ in range(4)))
    gaps, collections = [], []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(info)

    gc.collect()
    gc.callbacks.append(collected)
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    started = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(count)))
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.003)  # so that a last gap ends
    ticking.cancel()
    gc.callbacks.remove(collected)
    return Figures(seconds, gaps, len(collections))


CONTENDERS = {"on the loop": on_the_loop, "EngineClient": in_the_client, "nothing": nothing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.answers} answers at once, {args.tokens} tokens each, K = {args.candidates}; {args.rounds} rounds")
    heads = ("MB", "seconds", "tokens/s", "longest gap", "p99 gap", "full collections")
    print(f"{'form':7} {'read':13}" + "".join(f"{head:>{len(head) + 3}}" for head in heads))
    for form in args.forms:
        body = answer(form, args)
        results: dict[str, list[Figures]] = {name: [] for name in CONTENDERS}
        with served(body) as url:
            for _ in range(args.rounds):
                for name, run in CONTENDERS.items():
                    results[name].append(asyncio.run(run(url, args)))
        report(form, results, len(body) * args.answers / 1e6, args.tokens * args.answers)


def report(form: str, results: dict[str, list[Figures]], megabytes: float, tokens: int) -> None:
    for name, rounds in results.items():
        seconds = statistics.median(figures.seconds for figures in rounds)
        gaps = sorted(gap for figures in rounds for gap in figures.gaps)
        calls = f"{megabytes:5.0f} {seconds:9.2f} {tokens / seconds:10.0f}" if name != "nothing" else " " * 26
        print(
            f"{form:7} {name:13}{calls} {gaps[-1] * 1e3:10.1f} ms {gaps[int(len(gaps) * 0.99)] * 1e3:6.1f} ms"
            f" {sum(figures.collections for figures in rounds):18}"
        )
    ratios = [
        max(ours.gaps) / max(theirs.gaps) for ours, theirs in zip(results["EngineClient"], results["on the loop"], strict=True)
    ]
    print(f"{form:7} longest gap, EngineClient / on the loop = {statistics.median(ratios):.3f} (median of the rounds)")


if __name__ == "__main__":
    main()
