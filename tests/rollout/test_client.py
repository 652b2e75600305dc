"""Calls to an engine over real sockets, with a server that fails as it is told."""

import asyncio
import contextlib
import pickle
import threading

import orjson
import pytest

from miles_sc.rollout.engines.sglang import client as client_module
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient, EngineError
from tests.rollout.stub_server import Hang, Reply, Reset, StubServer

REQUEST = {"input_ids": [3, 1, 4], "sampling_params": {"temperature": 1.0, "top_p": 1.0}, "return_logprob": True}
ANSWER = Reply(b'{"output_ids":[1,5],"meta_info":{"id":"x"}}')
PATIENT = {"backoff": 0.01, "attempts": 3}


@contextlib.asynccontextmanager
async def engine(script, *, port=0, **settings):
    """A server under ``/generate`` and its client."""
    script = script if isinstance(script, dict) else {"/generate": script}
    with StubServer(script, port=port) as server:
        client = EngineClient(server.url, ClientSettings(**{**PATIENT, **settings}))
        try:
            yield client, server
        finally:
            await client.close()


def asked(script, *, request=REQUEST, read=lambda answer: answer["output_ids"], **settings):
    """Outcome of one generation, and the server that it was asked of."""

    async def main():
        async with engine(script, **settings) as (client, server):
            outcome = (await asyncio.gather(client.ask("/generate", request, read), return_exceptions=True))[0]
            return outcome, server

    return asyncio.run(main())


def rids(server, path="/generate"):
    return [body["rid"] for body in server.bodies(path)]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


# --- what is sent and read


def test_the_request_arrives_as_it_was_with_a_name_for_the_call():
    request = dict(REQUEST)
    outcome, server = asked(ANSWER, request=request)
    assert outcome == [1, 5] and request == REQUEST
    (rid,) = rids(server)
    assert len(rid) == 32 and server.calls[0].content == orjson.dumps(REQUEST)[:-1] + b',"rid":"%b"}' % rid.encode()


def test_a_request_keeps_the_name_that_it_brings():
    _, server = asked(ANSWER, request={"rid": "mine", **REQUEST})
    assert server.calls[0].content == orjson.dumps({"rid": "mine", **REQUEST})


def test_answers_are_read_in_another_thread():
    outcome, _ = asked(ANSWER, read=lambda answer: threading.current_thread())
    assert isinstance(outcome, threading.Thread) and outcome is not threading.current_thread()


def test_what_the_reader_raises_is_raised_without_another_attempt():
    def read(answer):
        raise ValueError("row 3 is short")

    outcome, server = asked(ANSWER, read=read)
    assert type(outcome) is ValueError and str(outcome) == "row 3 is short" and len(server.calls) == 1


def test_key_and_encoding_are_asked_for_and_no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def main():
        with StubServer({"/generate": ANSWER}) as server:
            client = EngineClient(server.url, api_key="secret")
            await client.ask("/generate", REQUEST, len)
            await client.close()
            return server.calls[0].headers

    headers = asyncio.run(main())
    assert headers["authorization"] == "Bearer secret" and headers["accept-encoding"] == "identity"


# --- what is tried again, and what is not

PASSING = {
    "reset": (Reset(), "the connection broke", None),
    "cut short": (Reply(b'{"a":', missing=10), "the connection broke", None),
    "truncated JSON": (Reply(b'{"output_ids":[1,2'), r"truncated, or no JSON .*18 bytes", 200),
    "no body": (Reply(b""), "0 bytes", 200),
    "not UTF-8": (Reply(b'{"text":"\xff"}'), "not valid UTF-8", 200),
    "timed out": (Hang(), "no answer within 0.5 s; raise request_timeout", None),
    **{
        str(status): (Reply(b'{"error":{"message":"busy"}}', status), f'answered {status}: .*"busy"', status)
        for status in (408, 425, 429, 500, 502, 503, 504)
    },
}


def patience(fault):
    return {"request_timeout": 0.5} if fault == "timed out" else {}


@pytest.mark.parametrize("fault", PASSING)
def test_what_may_pass_is_tried_again_under_a_new_name(fault):
    outcome, server = asked([PASSING[fault][0], ANSWER], request={"rid": "mine", **REQUEST}, **patience(fault))
    assert outcome == [1, 5]
    first, second = rids(server)
    assert first == "mine" and len(second) == 32
    assert rids(server, "/abort_request") == (["mine"] if fault == "timed out" else [])


@pytest.mark.parametrize("fault", PASSING)
def test_what_does_not_pass_is_told_after_the_last_attempt(fault):
    action, cause, status = PASSING[fault]
    outcome, server = asked(action, **patience(fault))
    with pytest.raises(EngineError, match=f"POST {server.url}/generate, attempt 3 of 3: .*{cause}") as raised:
        raise outcome
    assert raised.value.status == status
    assert isinstance(raised.value.__cause__, TimeoutError) == (fault == "timed out")
    names = rids(server)
    assert len(set(names)) == 3
    assert rids(server, "/abort_request") == (names if fault == "timed out" else [])


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 405, 409, 413, 422])
def test_a_refusal_is_told_at_once_in_the_servers_words(status):
    outcome, server = asked(Reply(b'{"error":{"message":"max_new_tokens must be at least 0"}}', status))
    with pytest.raises(
        EngineError, match=f"attempt 1 of 3: answered {status}: .*max_new_tokens must be at least 0.*; "
    ) as raised:
        raise outcome
    assert raised.value.status == status and len(server.calls) == 1


def test_a_long_refusal_is_shortened_and_survives_a_process_boundary():
    outcome, _ = asked(Reply(b"no  such\n" * 1000, 400, "text/plain"))
    assert "no such no such" in str(outcome) and " ...; " in str(outcome) and len(str(outcome)) < 700
    copy = pickle.loads(pickle.dumps(outcome))
    assert (type(copy), str(copy), copy.status) == (EngineError, str(outcome), 400)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[1]", "a JSON list and no object"),
        (b"null", "a JSON NoneType and no object"),
        (b'{"meta_info":{"output_token_logprobs":[[NaN,5,null]]}}', "holds NaN, which is no JSON number"),
        (b'{"meta_info":{"output_token_logprobs":[[-Infinity,5,null]]}}', "holds -Infinity, which is no JSON number"),
    ],
)
def test_what_the_engine_means_to_say_is_not_asked_again(body, message):
    outcome, server = asked(Reply(body))
    with pytest.raises(EngineError, match=message) as raised:
        raise outcome
    assert raised.value.status == 200 and len(server.calls) == 1


def test_a_server_that_comes_up_later_is_reached():
    async def main():
        async with engine(ANSWER) as (_, gone):
            pass
        client = EngineClient(f"127.0.0.1:{gone.port}", ClientSettings(attempts=8, backoff=0.02))
        call = asyncio.create_task(client.ask("/generate", REQUEST, len))
        await asyncio.sleep(0.05)
        with StubServer({"/generate": ANSWER}, port=gone.port) as server:
            assert await call == 2 and len(server.calls) == 1
            await client.close()
        return gone.url

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named():
    async def main():
        async with engine(ANSWER) as (_, gone):
            pass
        client = EngineClient(gone.url, ClientSettings(**PATIENT))
        with pytest.raises(EngineError, match=f"GET {gone.url}/health, attempt 3 of 3: cannot connect .*running at") as raised:
            await client.get("/health")
        assert raised.value.status is None
        await client.close()

    asyncio.run(main())


def test_a_restarted_servers_dead_connections_are_not_used():
    async def main():
        with StubServer({"/generate": ANSWER}) as first:
            client = EngineClient(first.url, ClientSettings(attempts=1))
            await client.ask("/generate", REQUEST, len)
        with StubServer({"/generate": ANSWER}, port=first.port):
            assert await client.ask("/generate", REQUEST, len) == 2
            await client.close()

    asyncio.run(main())


# --- cancellation


def test_a_cancelled_call_is_aborted_and_leaves_its_slot():
    async def main():
        async with engine([Hang(), ANSWER], max_connections=1) as (client, server):
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: server.calls)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert rids(server, "/abort_request") == rids(server)
            assert await client.ask("/generate", REQUEST, len) == 2

    asyncio.run(main())


@pytest.mark.parametrize("abort", [Hang(), Reset(), Reply(b"no", 500)])
def test_an_abort_that_fails_changes_nothing(abort, monkeypatch):
    monkeypatch.setattr(client_module, "_ABORT_SECONDS", 0.1)

    async def main():
        script = {"/generate": [Hang(), ANSWER, Hang()], "/abort_request": abort}
        async with engine(script, request_timeout=0.5) as (client, server):
            assert await client.ask("/generate", REQUEST, len) == 2
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: len(rids(server)) == 3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert rids(server, "/abort_request") == [rids(server)[0], rids(server)[2]]

    asyncio.run(main())


def test_the_engines_behind_a_router_are_told_to_abort():
    async def main():
        with StubServer({"/generate": Hang()}) as router, StubServer({}) as first, StubServer({}) as second:
            client = EngineClient(router.url, abort_urls=[first.url, second.url])
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: router.calls)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await client.close()
            assert rids(first, "/abort_request") == rids(second, "/abort_request") == rids(router)
            assert rids(router, "/abort_request") == []

    asyncio.run(main())


@pytest.mark.parametrize("abort", [Reply(b"{}", 404), Reply(b"{}", 500)])
def test_an_abort_that_is_refused_is_told(abort, caplog):
    async def main():
        async with engine({"/generate": [Hang()], "/abort_request": abort}) as (client, server):
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: server.calls)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())
    assert f"which may run on: status {abort.status}" in caplog.text


def test_a_call_cancelled_while_it_waits_is_never_sent():
    async def main():
        async with engine([Hang(), ANSWER], max_connections=1) as (client, server):
            first = asyncio.create_task(client.ask("/generate", {"rid": "first"}, len))
            await until(lambda: server.calls)
            second = asyncio.create_task(client.ask("/generate", {"rid": "second"}, len))
            await asyncio.sleep(0.02)
            for call in (second, first):
                call.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            await client.ask("/generate", {"rid": "third"}, len)
            assert rids(server) == ["first", "third"] and rids(server, "/abort_request") == ["first"]

    asyncio.run(main())


# --- many calls


def test_more_calls_than_slots_wait_without_timing_out():
    async def main():
        slow = Reply(ANSWER.body, delay=0.25)
        async with engine(slow, max_connections=2, request_timeout=0.8, attempts=1) as (client, server):
            answers = await asyncio.gather(*(client.ask("/generate", REQUEST, len) for _ in range(8)))
            assert answers == [2] * 8 and server.most_at_once == 2

    asyncio.run(main())


def test_control_calls_do_not_wait_for_generations():
    async def main():
        script = {"/generate": Hang(), "/pause_generation": Reply(b'{"status":"ok"}')}
        async with engine(script, max_connections=1) as (client, server):
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: server.calls)
            assert await client.post("/pause_generation", {"mode": "abort"}) == {"status": "ok"}
            assert server.bodies("/pause_generation") == [{"mode": "abort"}]
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(main())


# --- control calls


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(b'{"a":[1]}'), {"a": [1]}),
        (Reply(b"[1,2]", content_type="application/json; charset=utf-8"), [1, 2]),
        (Reply(b"", content_type="text/plain"), {}),
        (Reply("Cache flushed. \u00e9".encode(), content_type="text/plain; charset=utf-8"), {"message": "Cache flushed. \u00e9"}),
    ],
)
def test_small_answers_of_every_kind(reply, expected):
    async def main():
        async with engine({"/it": [Reply(b"", 503), reply]}) as (client, server):
            assert await client.get("/it") == expected
            assert [call.method for call in server.calls] == ["GET", "GET"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(b"[1]"), "POST .*/it, attempt 1 of 3: the answer is a JSON list and no object"),
        (Reply(b'{"success":false,"message":"no such file"}', 400), "attempt 1 of 3: answered 400: .*no such file"),
        (Reply(b'{"a"'), "attempt 3 of 3: the answer is truncated"),
    ],
)
def test_a_control_call_that_fails_says_so(reply, message):
    async def main():
        async with engine({"/it": reply}) as (client, _):
            with pytest.raises(EngineError, match=message):
                await client.post("/it", {})

    asyncio.run(main())


# --- life


def test_closing_ends_calls_threads_and_connections():
    async def main():
        async with engine([ANSWER, Hang()]) as (client, server):
            await client.ask("/generate", REQUEST, len)
            call = asyncio.create_task(client.ask("/generate", REQUEST, len))
            await until(lambda: len(server.calls) == 2)
            await client.close()
            await client.close()
            with pytest.raises(ValueError, match="client is closed"):
                await call
            with pytest.raises(ValueError, match="client is closed"):
                await client.get("/health")
            assert rids(server, "/abort_request") == rids(server)[1:]
            assert not [thread for thread in threading.enumerate() if thread.name == "miles-sc-ingest"]

    asyncio.run(main())


def test_one_client_serves_several_event_loops():
    with StubServer({"/generate": ANSWER}) as server:
        client = EngineClient(server.url)
        assert [asyncio.run(client.ask("/generate", REQUEST, len)) for _ in range(3)] == [2, 2, 2]
        asyncio.run(client.close())


@pytest.mark.parametrize(
    ("url", "normalised"),
    [
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://engine:30000/", "http://engine:30000"),
        ("https://engine/under/", "https://engine/under"),
        ("[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_addresses(url, normalised):
    client = EngineClient(url)
    assert client.url == normalised
    asyncio.run(client.close())


@pytest.mark.parametrize("url", ["", "ftp://engine:1", "http://", "engine:port", "unix:///socket"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="url = .*give http://host:port"):
        EngineClient(url)


@pytest.mark.parametrize(
    ("name", "value"),
    [("attempts", 0), ("max_connections", 0), ("request_timeout", 0), ("connect_timeout", -1.0), ("backoff", -0.5)],
)
def test_senseless_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}: give"):
        ClientSettings(**{name: value})
