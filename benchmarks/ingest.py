"""An engine's answer from the bytes that came to validated arrays, against json.loads and a loop over the rows.

    python benchmarks/ingest.py [--sizes 4096x128 8x128] [--rounds 9]

Every figure is a ratio of the fastest runs of contenders that ran in turn. The baseline reads the nested answer of the same
content and validates nothing. Beside it stands what it takes while the garbage collector is kept off, as ours always is: on
CPython 3.11 the collector walks the lists of a nested answer over and over while they are made. Validation is what
`Candidates.validate` takes of the whole.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import orjson
import pybase64

from miles_sc.rollout.answer import GeneratedTokens, read_generated_tokens
from miles_sc.rollout.engines.sglang.ingest import read_answer

VOCABULARY = 151_936
LEAST_SECONDS = 0.02  # a run shorter than this is repeated, and the repetitions are timed together
BASE, COLLECTOR_OFF = "json.loads + row loop", "the same, collector off"


def make_answers(rows: int, k: int) -> dict[str, bytes]:
    """One answer in each form, and another of filtered sampling, in two: SGLang's and, for the baseline, nested."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.choice(VOCABULARY, k, replace=False) for _ in range(rows)]).astype(np.int32)
    logits = -np.sort(-rng.exponential(3.0, (rows, k)), axis=1)
    kept_mass = 0.99
    log_probs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)) + np.log(kept_mass)).astype(np.float32)
    slots = [rng.choice(k, p=np.exp(row) / np.exp(row).sum()) for row in log_probs.astype(np.float64)]
    at = np.arange(rows), slots
    meta = {
        "finish_reason": {"type": "length", "length": rows},
        "completion_tokens": rows,
        "weight_versions": [{"version": "1", "start": 0, "end": rows}],
        "output_token_logprobs": list(zip(log_probs[at].tolist(), ids[at].tolist(), [None] * rows, strict=True)),
    }
    lengths = np.maximum(rng.integers(1, k + 1, rows), np.add(slots, 1)).tolist()
    kept = [row[:length].astype(np.float64) for row, length in zip(log_probs, lengths, strict=True)]
    support = [(row - np.log(np.exp(row).sum())).tolist() for row in kept]
    support_ids = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    forms = {
        "nested": {"output_top_logprobs": nested(log_probs.tolist(), ids.tolist())},
        "flat": flat(log_probs, ids, "flat", lambda array: array.ravel().tolist()),
        "flat base64": flat(log_probs, ids, "flat_b64", lambda array: pybase64.b64encode(array).decode()),
        "support": {"output_token_sampling_mask": support_ids, "output_token_sampling_logprobs": support},
        "support, nested": {"output_top_logprobs": nested(support, support_ids)},
    }
    outer = {"text": "some text " * rows, "output_ids": ids[at].tolist()}
    return {name: orjson.dumps({**outer, "meta_info": {**meta, **fields}}) for name, fields in forms.items()}


def nested(log_probs: list[list[float]], ids: list[list[int]]) -> list[list[tuple[float, int, None]]]:
    return [list(zip(values, tokens, [None] * len(tokens), strict=True)) for values, tokens in zip(log_probs, ids, strict=True)]


def flat(log_probs: np.ndarray, ids: np.ndarray, suffix: str, write: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        "output_top_logprobs_shape": list(ids.shape),
        "output_top_logprobs_null_prefix": 0,
        f"output_top_logprobs_val_{suffix}": write(log_probs),
        f"output_top_logprobs_idx_{suffix}": write(ids),
    }


def row_loop(body: bytes, k: int) -> tuple[np.ndarray, np.ndarray, list[int], list[float]]:
    """How one reads such an answer without thinking about it."""
    meta = json.loads(body)["meta_info"]
    rows = meta["output_top_logprobs"]
    ids, log_probs = np.full((len(rows), k), -1, np.int32), np.full((len(rows), k), -np.inf, np.float32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = [entry[1] for entry in row]
        log_probs[number, : len(row)] = [entry[0] for entry in row]
    sampled = meta["output_token_logprobs"]
    return ids, log_probs, [entry[1] for entry in sampled], [entry[0] for entry in sampled]


def with_collector_off(run: Callable[[], object]) -> None:
    gc.disable()
    run()
    gc.enable()


def ours(body: bytes, k: int, mode: str = "selected") -> GeneratedTokens:
    def read(answer: dict[str, Any]) -> GeneratedTokens:
        return read_generated_tokens(answer["meta_info"], k=k, mode=mode, vocab_size=VOCABULARY)

    return read_answer(body, read)


def validation(generated: GeneratedTokens) -> Callable[[], None]:
    """What `read_generated_tokens` asks of the candidates."""
    validate = partial(generated.candidates.validate, vocab_size=VOCABULARY)
    if generated.support is not None:
        return partial(validate, complete=True)
    return partial(validate, sampled_token_ids=generated.token_ids, sampled_log_probs=generated.log_probs)


def fastest_in_turn(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each contender's fastest run; the first, which warms up, settles how often a short one is repeated."""
    repeats: dict[str, int] = {}
    for name, run in contenders.items():
        run()
        repeats[name] = max(1, round(LEAST_SECONDS / seconds(run, 1)))
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            best[name] = min(best[name], seconds(run, repeats[name]))
    return best


def seconds(run: Callable[[], object], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def compare(rows: int, k: int, rounds: int) -> None:
    bodies = make_answers(rows, k)
    selected = {form: partial(ours, bodies[form], k) for form in ("nested", "flat", "flat base64")}
    support = partial(ours, bodies["support"], k, "support")
    groups = {
        "selected": ("nested", selected, validation(selected["flat base64"]())),
        "support": ("support, nested", {"support": support}, validation(support())),
    }
    for mode, (base_form, readers, validate) in groups.items():
        base = partial(row_loop, bodies[base_form], k)
        contenders = {BASE: base, COLLECTOR_OFF: partial(with_collector_off, base), **readers, "validation": validate}
        taken = fastest_in_turn(contenders, rounds)
        print(f"\n{f'{rows} tokens, K = {k}, {mode}':34}{'speed / baseline':>20}{'of it validation':>20}")
        for name in (BASE, COLLECTOR_OFF, *readers):
            share = f"{taken['validation'] / taken[name]:19.1%}" if name in readers else ""
            print(f"  {name:32}{taken[BASE] / taken[name]:19.2f}x{share:>20}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["4096x128", "8x128", "8x8"], metavar="TOKENSxK")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for size in args.sizes:
        compare(*map(int, size.split("x")), args.rounds)


if __name__ == "__main__":
    main()
