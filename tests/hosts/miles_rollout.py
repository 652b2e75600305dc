"""Miles's rollout side, driven as its rollout manager drives it, against an engine at some address."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn

from tests.hosts.miles_host import parse

CONVERSATION = [{"role": "user", "content": "3 + 4 ="}]


def rollout_run(model: str, url: str, *flags: str, **changes: object) -> Any:
    """A parsed run whose router is the engine at ``url``."""
    run = parse(*flags, model=model)
    address = urlsplit(url)
    vars(run).update({"sglang_router_ip": address.hostname, "sglang_router_port": address.port, **changes})
    return run


def in_miles(run: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a coroutine with Miles's HTTP client of this event loop."""
    from miles.utils import http_utils

    async def with_client() -> Any:
        http_utils._http_client = None
        http_utils.init_http_client(run)
        try:
            return await work()
        finally:
            await http_utils._http_client.aclose()
            http_utils._http_client = None

    return asyncio.run(with_client())


def fresh_sample(prompt: object = "3 + 4 =", *, index: int = 0) -> Any:
    from miles.utils.types import Sample

    return Sample(prompt=prompt, index=index, group_index=index // 2, reward=1.0)


async def generate(run: Any, sample: Any, *, evaluation: bool = False, legacy: bool = False, length: int = 6) -> Any:
    """One sample through Miles's ``generate_and_rm``, new or old."""
    if legacy:
        from miles.rollout import sglang_rollout as old
        from miles.utils.misc import SingletonMeta

        SingletonMeta.clear_all_instances()
        params = {**old.GenerateState(run).sampling_params, "max_new_tokens": length}
        return await old.generate_and_rm(run, sample, params, evaluation=evaluation)
    from miles.rollout.inference_rollout import inference_rollout_common as new

    state = new.GenerateState(run)
    return await new.generate_and_rm(state, sample, {**state.sampling_params, "max_new_tokens": length}, evaluation=evaluation)


async def merged_turns(run: Any, *, index: int = 0) -> tuple[list[Any], Any, int]:
    """Two single turns, the second on top of the first and an observation.

    Returns:
        The turns, what Miles merges them to, and the tokens of the observation.
    """
    from miles.rollout.generate_hub.single_turn import GenerateFnInput
    from miles.rollout.generate_hub.single_turn import generate as single_turn
    from miles.rollout.generate_utils.sample_utils import merge_samples
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    state = GenerateState(run)
    turns, prompt = [], "3 + 4 ="
    for _ in range(2):
        given = GenerateFnInput(
            state=state, sample=fresh_sample(prompt, index=index), evaluation=False,
            sampling_params={**state.sampling_params, "max_new_tokens": 5},
        )  # fmt: skip
        sample = (await single_turn(given)).samples
        sample.status = Sample.Status.COMPLETED
        turns.append(sample)
        prompt = state.tokenizer.decode(sample.tokens) + " 1"
    # token ids, not text: the second prompt is the first turn and the observation
    told, (first, second) = state.tokenizer.encode(" 1"), turns
    second.tokens = [*first.tokens, *told, *second.tokens[len(second.tokens) - second.response_length :]]
    second.prompt = first.prompt + " and more"
    return turns, merge_samples(turns, state.tokenizer), len(told)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """An ASGI application on a free port, in a thread."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@contextmanager
def session_server(run: Any, version: str) -> Iterator[None]:
    """Miles's session server of ``v1`` or ``v2`` in front of the run's router; the run then knows its address."""
    from miles.rollout.session.server import SessionServer

    run.use_session_server = version
    router = f"http://{run.sglang_router_ip}:{run.sglang_router_port}"
    with served(SessionServer(run, router).app) as url:
        run.session_server_ip, run.session_server_ports = "127.0.0.1", [urlsplit(url).port]
        yield


async def two_turns(base_url: str, prompt: list[dict[str, str]], request_kwargs: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """An agent: asks, answers itself as the user, asks again. Keeps what it was told in ``TOLD``."""
    messages = list(prompt)
    async with httpx.AsyncClient(timeout=60) as client:
        for turn in range(2):
            reply = await client.post(
                f"{base_url}/v1/chat/completions", json={"model": "default", "messages": messages, **request_kwargs, **ASKED}
            )
            TOLD.append(reply)
            reply.raise_for_status()
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"and {turn} more?"}]
    return {"turns": 2}


TOLD: list[httpx.Response] = []
ASKED: dict[str, Any] = {}


async def agentic(run: Any, *, evaluation: bool = False, length: int = 6, index: int = 0) -> list[Any]:
    """One conversation of :func:`two_turns` through Miles's agentic generate function and its session server."""
    from miles.rollout.inference_rollout import inference_rollout_common as new

    run.custom_agent_function_path = "tests.hosts.miles_rollout.two_turns"
    run.custom_generate_function_path = "miles.rollout.generate_hub.agentic_tool_call.generate"
    state = new.GenerateState(run)
    params = {**state.sampling_params, "max_new_tokens": length}
    TOLD.clear()
    samples = await new.generate_and_rm(state, fresh_sample(CONVERSATION, index=index), params, evaluation=evaluation)
    return samples if isinstance(samples, list) else [samples]
