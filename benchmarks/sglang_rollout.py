"""What recording candidates costs a rollout on a real SGLang server, as ratios within one run.

    python benchmarks/sglang_rollout.py --hf-checkpoint MODEL --sglang-python .venv-sglang/bin/python

The same prompts are sampled by turns without candidates (K = 0), with K of them as flat base64 and nested, and filtered, where
each token's support is recorded instead. Beside the whole rollout stands what the server and the wire take of it: the same calls,
whose answers are thrown away unread.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout import Sample, configure_request
from miles_sc.rollout.engines.sglang.engine import SglangEngine
from miles_sc.rollout.engines.sglang.settings import SglangSettings
from miles_sc.rollout.generate import GenerationSettings, all_or_none, generate_response


@dataclass(frozen=True)
class Arm:
    """An engine that asks for one form of answer."""

    engine: SglangEngine
    config: ScoreCenteringConfig
    nested: bool = False

    async def generate(self, request: Mapping[str, Any], read: Callable[[Any], Any]) -> Any:
        if self.nested:
            request = {name: value for name, value in request.items() if not name.startswith("return_flat")}
        sampling = request["sampling_params"] | {"ignore_eos": True}  # every arm generates as much
        return await self.engine.generate({**request, "sampling_params": sampling}, read)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR")
    parser.add_argument("--sglang-python", required=True, metavar="FILE")
    parser.add_argument("--rollout-top-logprobs-num", type=int, default=128, metavar="K")
    parser.add_argument("--samples", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="of each response (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    k, vocab_size = args.rollout_top_logprobs_num, AutoConfig.from_pretrained(args.hf_checkpoint).vocab_size
    selected, filtered = ScoreCenteringConfig(top_logprobs_num=k), ScoreCenteringConfig(top_logprobs_num=k, top_k=k, top_p=0.99)
    with tempfile.TemporaryDirectory() as folder:
        engine = await SglangEngine.start(
            SglangSettings(python=args.sglang_python), model_path=args.hf_checkpoint, config=filtered, log_dir=Path(folder)
        )
        try:
            arms = {
                "K = 0": Arm(engine, ScoreCenteringConfig()),
                f"K = {k}, base64": Arm(engine, selected),
                f"K = {k}, nested": Arm(engine, selected, nested=True),
                f"top-k {k}, top-p 0.99": Arm(engine, filtered),
            }
            seconds = await _in_turn(args, vocab_size, arms)
        finally:
            await engine.close()
    _print(args, seconds)


async def _in_turn(args: argparse.Namespace, vocab_size: int, arms: Mapping[str, Arm]) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {name: {"rollout": [], "server": []} for name in arms}
    for repeat in range(args.repeats + 1):
        for name, arm in arms.items():
            for part, run in (("rollout", _rollout), ("server", _unread)):
                started = time.perf_counter()
                await run(arm, args, vocab_size)
                if repeat:  # the first is a warm-up
                    seconds[name][part].append(time.perf_counter() - started)
    return seconds


async def _rollout(arm: Arm, args: argparse.Namespace, vocab_size: int) -> None:
    settings = GenerationSettings(arm.config, args.tokens, vocab_size, decode=lambda token_ids: "")
    samples = [Sample(tokens=_prompt(i, vocab_size), index=i) for i in range(args.samples)]
    await all_or_none(generate_response(arm, sample, settings, sampling_seed=sample.index) for sample in samples)
    assert all(sample.response_length == args.tokens for sample in samples)


async def _unread(arm: Arm, args: argparse.Namespace, vocab_size: int) -> None:
    body = {"sampling_params": {"max_new_tokens": args.tokens}, "return_logprob": True}
    requests = [configure_request(arm.config, {"input_ids": _prompt(i, vocab_size), **body}) for i in range(args.samples)]
    await all_or_none(arm.generate(request, lambda answer: None) for request in requests)


def _prompt(index: int, vocab_size: int) -> list[int]:
    return [index % vocab_size, 1, 2]


def _print(args: argparse.Namespace, seconds: dict[str, dict[str, list[float]]]) -> None:
    base = statistics.median(seconds["K = 0"]["rollout"])
    tokens = args.samples * args.tokens
    print(f"{args.samples} responses of {args.tokens} tokens; K = 0: {tokens / base:,.0f} tokens/s")
    print(f"{'':28}{'rollout':>10}{'server and wire':>18}{'throughput':>12}")
    for name, parts in seconds.items():
        rollout, server = (statistics.median(parts[part]) for part in ("rollout", "server"))
        print(f"{name:28}{rollout / base:>9.2f}x{server / base:>17.2f}x{base / rollout:>11.2f}x")


if __name__ == "__main__":
    asyncio.run(main())
