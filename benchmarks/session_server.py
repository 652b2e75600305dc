"""The session server under load: nothing lost, what a turn costs, and memory that comes back.

    python benchmarks/session_server.py [--sessions 200] [--turns 4] [--tokens 64] [--candidates 128] [--rounds 3]

Three processes on this machine: a stub engine that answers at once, the session server, and this one, which plays all agents at
the same time and then the trainer. Every token, log-prob and candidate of every Sample is compared with what the engine must
have said for exactly that prompt. Memory is the server's resident set; its start is taken after a warm-up of a tenth of the
sessions, deleted again, since the first calls load code and fill the allocators' pools.
"""

import argparse
import asyncio
import base64
import os
import signal
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path

import httpx
import numpy as np
import orjson

VOCABULARY, ROWS = 32_000, 1024


class Sampler:
    """A table of distributions; which row a token is drawn from depends on the whole prompt and on the token's place."""

    def __init__(self, candidates: int, tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.tokens = tokens
        self.ids = np.argsort(rng.random((ROWS, 4 * candidates)), axis=1)[:, :candidates].astype(np.int32)
        log_probs = -np.sort(12 + rng.gumbel(size=(ROWS, candidates)), axis=1)
        self.log_probs = np.minimum(log_probs, -6).astype(np.float32)

    def answer(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the tables and sampled token ids, both ``[tokens]``."""
        start = zlib.crc32(prompt.astype(np.int32).tobytes())
        rows = (start + 7919 * np.arange(self.tokens)) % ROWS
        return rows, self.ids[rows, rows % self.ids.shape[1]]


def words(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


# --- the stub engine


def serve_engine(args: argparse.Namespace) -> None:
    import uvicorn
    from fastapi import FastAPI, Request, Response

    sampler, app = Sampler(args.candidates, args.tokens), FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = orjson.loads(await request.body())
        prompt = np.array([_id(word) for message in asked["messages"] for word in message["content"].split()])
        rows, ids = sampler.answer(prompt)
        completion = _completion(sampler, prompt, rows, ids, asked.get("temperature") or 1.0)
        return Response(orjson.dumps(completion), media_type="application/json")

    @app.get("/get_model_info")
    async def model_info() -> dict:
        return {"model_path": "stub"}

    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning", access_log=False)


def _id(word: str) -> int:
    return int(word) if word.isdigit() else zlib.crc32(word.encode()) % VOCABULARY


def _completion(sampler: Sampler, prompt: np.ndarray, rows: np.ndarray, ids: np.ndarray, temperature: float) -> dict:
    head = sampler.log_probs[rows]
    if temperature != 1.0:  # as the session server asks before it listens; the head keeps its mass
        scaled = head / temperature
        head = (scaled + np.log(np.exp(head).sum(1, keepdims=True) / np.exp(scaled).sum(1, keepdims=True))).astype(np.float32)
    log_probs = head[np.arange(len(rows)), rows % sampler.ids.shape[1]]
    meta = {
        "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs.tolist(), ids.tolist(), strict=True)],
        "output_top_logprobs_shape": [len(rows), sampler.ids.shape[1]],
        "completion_tokens": len(rows),
        "finish_reason": {"type": "length", "length": len(rows)},
        "weight_version": "1",
    }
    for name, table in (("val", head), ("idx", sampler.ids[rows])):
        meta[f"output_top_logprobs_{name}_flat_b64"] = base64.b64encode(table.tobytes()).decode()
    choice = {
        "index": 0, "message": {"role": "assistant", "content": words(ids)}, "logprobs": None, "finish_reason": "length",
        "prompt_token_ids": prompt.tolist(), "meta_info": meta,
    }  # fmt: skip
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "stub", "choices": [choice], "usage": {}}


# --- the agents and the trainer


class Load:
    """All agents at once against one session server."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args, self.sampler = args, Sampler(args.candidates, args.tokens)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False)
        self.latencies: list[float] = []

    async def round(self, sessions: int) -> list[str]:
        """Runs every conversation and checks every Sample; the sessions are still open."""
        return await asyncio.gather(*(self._conversation(number) for number in range(sessions)))

    async def delete(self, sessions: list[str]) -> None:
        for session in sessions:
            (await self.http.delete(f"/sessions/{session}")).raise_for_status()

    async def _conversation(self, number: int) -> str:
        session = (await self._post("/sessions", {}))["session_id"]
        messages: list[dict] = []
        for turn in range(self.args.turns):
            question = np.array([number, turn, 1000 + number * turn])
            messages.append({"role": "tool" if turn else "user", "content": words(question)})
            start = time.perf_counter()
            reply = await self._post(f"/sessions/{session}/v1/chat/completions", {"model": "stub", "messages": messages})
            self.latencies.append(time.perf_counter() - start)
            messages.append(reply["choices"][0]["message"])
        await self._check(session, messages)
        return session

    async def _check(self, session: str, messages: list[dict]) -> None:
        from miles_sc.rollout.session import decode_samples

        (sample,) = decode_samples((await self.http.post(f"/sessions/{session}/samples")).raise_for_status().content)
        parts = [np.array([int(word) for word in message["content"].split()]) for message in messages]
        tokens = np.concatenate(parts)
        assert sample.tokens == tokens.tolist(), f"{session}: tokens"
        start, prompt_length = len(parts[0]), len(parts[0])
        for place, part in enumerate(parts[1:], start=1):
            rows = slice(start - prompt_length, start - prompt_length + len(part))
            table_rows, ids = self.sampler.answer(tokens[:start])
            if place % 2:
                assert ids.tolist() == part.tolist(), f"{session}: answer {place}"
                assert (sample.rollout_topk_token_ids[rows] == self.sampler.ids[table_rows]).all(), f"{session}: ids {place}"
                assert (sample.rollout_topk_log_probs[rows] == self.sampler.log_probs[table_rows]).all(), f"{session}: {place}"
                assert sample.loss_mask[rows] == [1] * len(part)
            else:
                assert (sample.rollout_topk_token_ids[rows] == -1).all() and sample.loss_mask[rows] == [0] * len(part)
            start += len(part)
        sample.check_rows()

    async def _post(self, path: str, body: dict) -> dict:
        return orjson.loads((await self.http.post(path, content=orjson.dumps(body))).raise_for_status().content)


async def measure(args: argparse.Namespace, url: str, pid: int) -> None:
    load = Load(args, url)
    untouched = resident_mb(pid)
    await load.delete(await load.round(max(1, args.sessions // 10)))
    await asyncio.sleep(3)
    start = resident_mb(pid)
    print(f"server: {untouched:.1f} MB untouched, {start:.1f} MB after the warm-up (start)")
    for number in range(1, args.rounds + 1):
        load.latencies.clear()
        began, cpu = time.perf_counter(), cpu_seconds(pid)
        sessions = await load.round(args.sessions)
        seconds, spent = time.perf_counter() - began, cpu_seconds(pid) - cpu
        held = orjson.loads((await load.http.get("/sessions")).content)["bytes_held"]
        full = resident_mb(pid)
        await load.delete(sessions)
        await asyncio.sleep(3)
        after = resident_mb(pid)
        turns = args.sessions * args.turns
        ordered = sorted(load.latencies)
        print(
            f"round {number}: {args.sessions} sessions x {args.turns} turns x {args.tokens} tokens, K = {args.candidates}, in "
            f"{seconds:.1f} s ({turns / seconds:.0f} turns/s), {1000 * spent / turns:.1f} ms of the server's CPU a turn, latency "
            f"{statistics.median(ordered):.2f} s in the median and {ordered[-1]:.2f} s at worst, every row checked; "
            f"{held / 1e6:.1f} MB held, {full:.1f} MB resident and {after:.1f} MB after deletion "
            f"({100 * (after / start - 1):+.1f} % of start)",
            flush=True,
        )
    await load.http.aclose()


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("sessions", 200), ("turns", 4), ("tokens", 64), ("candidates", 128), ("rounds", 3), ("port", 8700)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return serve_engine(args)
    engine = _process(__file__, *sys.argv[1:], "--engine")
    flags = f"--engine-url http://127.0.0.1:{args.port} --port {args.port + 1} --vocab-size {VOCABULARY}"
    server = _process("-m", "miles_sc.cli", "serve-session", *flags.split(), "--rollout-top-logprobs-num", str(args.candidates))
    url = f"http://127.0.0.1:{args.port + 1}"
    try:
        _wait_for(url)
        asyncio.run(measure(args, url, server.pid))
    finally:
        for process in (server, engine):
            process.send_signal(signal.SIGINT)
            process.wait(20)


def _process(*command: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *command])


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(url + "/health", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


if __name__ == "__main__":
    main()
