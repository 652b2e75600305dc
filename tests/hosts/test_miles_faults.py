"""Bad answers on the way to the real Miles, and the feature off: to the byte as without us."""

import hashlib
import json
import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from miles_sc.rollout.recorded_rows import RecordedRows
from tests.hosts import miles_rollout
from tests.hosts.miles_host import RECIPE, needs_miles
from tests.hosts.miles_rollout import agentic, fresh_sample, generate, in_miles, rollout_run, served, session_server

pytestmark = needs_miles

GENERATORS = pytest.mark.parametrize("legacy", [False, True], ids=["native", "legacy"])


def passing(url, spoil):
    """A layer before a server that spoils the ``meta_info`` of every answer; it keeps the bodies that it was sent."""
    bodies = []

    async def forward(request):
        body = await request.body()
        bodies.append((re.sub(r"[0-9a-f]{16,}", "ID", request.url.path), body))
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.request(
                request.method, f"{url}{request.url.path}", params=request.query_params, content=body,
                headers={"content-type": "application/json"},
            )  # fmt: skip
        if reply.headers.get("content-type") != "application/json":
            return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))
        answer = reply.json()
        for meta_info in [answer.get("meta_info"), *(choice.get("meta_info") for choice in answer.get("choices", []))]:
            if meta_info is not None:
                spoil(meta_info)
        return Response(json.dumps(answer), reply.status_code, media_type="application/json")

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "DELETE"])]), bodies


def cut(meta_info):
    """A layer that caps the candidates at two."""
    for row in meta_info.get("output_top_logprobs") or []:
        del row[2:]


def drop(meta_info):
    for name in [name for name in meta_info if name.startswith("output_top_logprobs")]:
        del meta_info[name]


def shift(meta_info):
    rows = meta_info.get("output_top_logprobs")
    if rows:
        meta_info["output_top_logprobs"] = rows[1:] + rows[:1]


FAULTS = [
    (cut, "2 candidates came and 4 were asked for"),
    (drop, "output_top_logprobs"),
    (shift, "the sampled token's log-prob differs by"),
]


@GENERATORS
@pytest.mark.parametrize(("spoil", "told"), FAULTS, ids=["cut", "dropped", "shifted"])
def test_a_bad_answer_appends_nothing(engine, legacy, spoil, told):
    app, _ = passing(engine.url, spoil)
    with served(app) as url:
        run = rollout_run(str(engine.model), url, *RECIPE)
        sample = fresh_sample()
        with pytest.raises(ValueError, match=told):
            for _ in range(20):  # an answer of one token cannot be shifted
                sample = fresh_sample()
                in_miles(run, lambda: generate(run, sample, legacy=legacy, length=20))  # noqa: B023
    assert sample.response_length == 0 and sample.response == "" and RecordedRows.of(sample) is None


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("spoil", "told"), FAULTS[:2], ids=["cut", "dropped"])
def test_a_bad_answer_stops_a_session_loudly(engine, version, spoil, told):
    """Miles gives up a sample whose agent fails, and tries another; an error of its assembly stops the run."""
    app, _ = passing(engine.url, spoil)
    with served(app) as url:
        run = rollout_run(str(engine.model), url, *RECIPE)
        with session_server(run, version), pytest.raises(RuntimeError, match=f"422.*{told}"):
            in_miles(run, lambda: agentic(run, length=20))


# --- off


def recorded(url, model, flags, *, evaluation):
    """Every byte that Miles sends an engine or a session server, for one sample of each kind."""
    app, bodies = passing(url, lambda meta_info: None)
    with served(app) as layer:
        for legacy in (False, True):
            run = rollout_run(model, layer, *flags)
            in_miles(run, lambda: generate(run, fresh_sample(), legacy=legacy, evaluation=evaluation))  # noqa: B023
        for version in ("v1", "v2"):
            run = rollout_run(model, layer, *flags)
            with session_server(run, version):
                layer_of_sessions, sent = passing(f"http://127.0.0.1:{run.session_server_ports[0]}", lambda meta_info: None)
                with served(layer_of_sessions) as address:
                    run.session_server_ports = [urlsplit(address).port]
                    in_miles(run, lambda: one_call(run, evaluation))  # noqa: B023
                bodies += sent
    return [(path, hashlib.sha256(body).hexdigest()) for path, body in bodies]


async def one_call(run, evaluation):
    from miles.rollout.base_types import GenerateFnOutput
    from miles.rollout.generate_utils import openai_endpoint_utils as tracer
    from miles.rollout.inference_rollout import inference_rollout_common as new

    async def agent(input):
        session = await tracer.OpenAIEndpointTracer.create(run)
        body = {"model": "m", "messages": miles_rollout.CONVERSATION, "temperature": 1.0, "max_tokens": 4}
        async with httpx.AsyncClient(timeout=60) as client:
            (await client.post(f"{session.base_url}/v1/chat/completions", json=body)).raise_for_status()
        await session.collect_samples(input.sample, max_seq_len=None)
        return GenerateFnOutput(samples=input.sample)

    state = new.GenerateState(run)
    state.generate_function = agent
    await new.generate_and_rm(state, fresh_sample(miles_rollout.CONVERSATION), {}, evaluation=evaluation)


def sent_by_another_interpreter(engine, flags, *, switch, evaluation=False):
    program = (
        "import json, sys; from tests.hosts.test_miles_faults import recorded; "
        "print('SENT', json.dumps(recorded(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), evaluation=sys.argv[4] == 'True')))"
    )
    command = [sys.executable, "-c", program, engine.url, str(engine.model), json.dumps(flags), str(evaluation)]
    environment = {**os.environ, "MILES_SC_HOSTS": switch, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SENT")] or [done.stderr[-2000:]]
    return json.loads(line.removeprefix("SENT "))


@pytest.mark.parametrize("evaluation", [False, True])
def test_off_sends_the_bytes_of_a_run_without_the_plugin(engine, evaluation):
    """To the engine: two native calls and two of sessions. To each session server: its opening, a call, its samples."""
    without = sent_by_another_interpreter(engine, [], switch="off", evaluation=evaluation)
    assert [path for path, _ in without].count("/sessions") == 2 and len(without) >= 10
    assert sent_by_another_interpreter(engine, [], switch="on", evaluation=evaluation) == without
    recording = sent_by_another_interpreter(engine, RECIPE, switch="on", evaluation=evaluation)
    changed = {sent[0] for before, sent in zip(without, recording, strict=True) if before != sent}
    # evaluation asks an engine what it asked before; its sessions are told of it
    assert changed == ({"/sessions"} if evaluation else {"/generate", "/v1/chat/completions"})


def test_samples_without_rows_travel_as_ever():
    """Off, the wire of a session is Miles's own to the byte; the fields that it does not name stay out."""
    program = (
        "import hashlib; from miles.utils.types import Sample; from miles.rollout.session.samples import codec; "
        "s = Sample(index=1, tokens=[1, 2, 3], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5]); "
        "print(*(hashlib.sha256(codec.encode_samples([s], {'a': 1}, fields=f)).hexdigest() "
        "for f in (codec.COMPUTED_FIELDS, codec.COMPUTED_FIELDS_V2)))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "MILES_SC_HOSTS": switch}, capture_output=True, text=True,
            timeout=300, check=True,
        ).stdout
        for switch in ("on", "off")
    ]  # fmt: skip
    assert told[0] == told[1] and len(told[0].split()) == 2


@pytest.mark.parametrize("legacy", [False, True], ids=["native", "legacy"])
def test_a_host_may_call_by_keyword(engine, legacy, monkeypatch):
    """What we stand in for is called as Miles's next commit likes; here ``post``, by name alone."""
    from miles.rollout import sglang_rollout

    run = rollout_run(str(engine.model), engine.url, *RECIPE)
    post = sglang_rollout.post
    monkeypatch.setattr(sglang_rollout, "post", lambda url, payload, **more: post(payload=payload, url=url, **more))
    assert RecordedRows.of(in_miles(run, lambda: generate(run, fresh_sample(), legacy=legacy))) is not None
