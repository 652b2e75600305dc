"""Limits over HTTP: bodies, sessions, turns, bytes, ages; and what happens to calls that nobody waits for any more."""

import concurrent.futures
import socket
import threading

import httpx
import openai
import pytest

from miles_sc.rollout.session.limits import SessionLimits
from tests.rollout.session.conftest import say
from tests.rollout.session.serving import wait_until


def chat(session):
    return f"/sessions/{session}/v1/chat/completions"


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_a_large_body_is_refused_however_it_comes(engine, serve, evaluation, declared):
    client = serve(limits=SessionLimits(max_body_bytes=1000))
    session, _ = client.open(evaluation=evaluation)
    body = b"x" * 1001
    status, message = client.refused("POST", chat(session), content=body if declared else iter([body[:600], body[600:]]))
    assert status == 413 and "more than 1000 bytes" in message and "--max-body-bytes" in message
    assert not engine.bodies


def test_a_body_of_many_megabytes_is_within_the_default(client):
    session, _ = client.open()
    body = {"messages": [{"role": "user", "content": "x"}], "metadata": {"padding": "x" * (20 << 20)}}
    assert client.request("POST", chat(session), json=body).status_code == 200


@pytest.mark.parametrize(
    ("header", "sent"), [("Transfer-Encoding: chunked", b"400\r\n" + b"x" * 1024 + b"\r\n"), ("Content-Length: 1001", b"")]
)
def test_a_large_body_is_refused_before_it_has_come(serve, header, sent):
    client = serve(limits=SessionLimits(max_body_bytes=1000))
    session, _ = client.open()
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"POST {chat(session)} HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode() + sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_not_waited_for(serve, monkeypatch):
    monkeypatch.setattr("miles_sc.rollout.session.calls._BODY_SECONDS", 0.2)
    client = serve()
    session, _ = client.open()
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"POST {chat(session)} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_sessions_are_counted(serve):
    client = serve(limits=SessionLimits(max_sessions=2))
    first, _ = client.open()
    client.open()
    status, message = client.refused("POST", "/sessions")
    assert status == 429 and "2 sessions are open" in message and "--max-sessions" in message
    client.request("DELETE", f"/sessions/{first}")
    client.open()


def test_a_session_past_its_age_makes_room(serve):
    client = serve(limits=SessionLimits(max_sessions=1, max_age=0.1))
    for _ in range(3):
        client.open()
        threading.Event().wait(0.15)


def test_turns_are_counted(engine, serve):
    client = serve(limits=SessionLimits(max_turns=2))
    session, agent = client.open()
    messages = say(agent, "b", say(agent, "a"))
    with pytest.raises(openai.APIStatusError, match="holds 2 turns: open another, or raise --max-turns") as refused:
        say(agent, "c", messages)
    assert refused.value.status_code == 413 and len(engine.bodies) == 2
    assert client.samples(session)[0].turns == 2


@pytest.mark.parametrize(("name", "status"), [("max_session_bytes", 413), ("max_total_bytes", 429)])
def test_bytes_are_counted(serve, name, status):
    client = serve(limits=SessionLimits(**{name: 800}))
    session, agent = client.open()
    say(agent, "a")
    held = client.request("GET", f"/sessions/{session}").json()["bytes_held"]
    with pytest.raises(openai.APIStatusError, match=f"hold.? {held} bytes and this turn would pass the limit of 800") as refused:
        say(agent.with_options(max_retries=0), "b")
    assert refused.value.status_code == status and f"--{name.replace('_', '-')}" in refused.value.message
    assert client.request("GET", f"/sessions/{session}").json()["bytes_held"] == held
    assert client.samples(session)[0].turns == 1


def test_what_a_session_held_is_free_again(serve):
    client = serve(limits=SessionLimits(max_total_bytes=800))
    session, agent = client.open()
    say(agent, "a")
    client.request("DELETE", f"/sessions/{session}")
    _, agent = client.open()
    say(agent, "a")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SessionLimits(max_idle=0.2), "nobody used it for 0.2 s, the most that --max-idle allows"),
        (SessionLimits(max_age=0.2), "it was 0.2 s old, the most that --max-age allows"),
    ],
)
def test_a_session_ends_by_itself_and_says_why(serve, limits, reason):
    client = serve(limits=limits)
    session, _ = client.open()
    wait_until(lambda: client.request("GET", "/sessions").json()["sessions"] == 0)
    status, message = client.refused("POST", chat(session), json={})
    assert status == 404 and f"it has ended: {reason}" in message


def test_a_session_with_a_call_under_way_is_not_idle(engine, serve):
    client = serve(limits=SessionLimits(max_idle=0.3))
    session, agent = client.open()
    engine.held.clear()
    with calling(agent) as call:
        wait_until(lambda: engine.waiting)
        for _ in range(30):  # longer than a session may be idle
            assert client.request("GET", f"/sessions/{session}").json()["calls_under_way"] == 1
            threading.Event().wait(0.03)
        engine.held.set()
        assert call.result(10)


def test_the_oldest_sessions_end_under_way_too(engine, serve):
    client = serve(limits=SessionLimits(max_age=0.3))
    _, agent = client.open()
    engine.held.clear()
    with calling(agent) as call:
        with pytest.raises(openai.NotFoundError, match="ended while this call was under way: it was 0.3 s old"):
            call.result(10)
    wait_until(lambda: len(engine.aborted) == 1)


# --- calls that nobody waits for


class calling:  # noqa: N801
    """One call in a thread; its future."""

    def __init__(self, agent, text="hi", **kwargs):
        self.pool = concurrent.futures.ThreadPoolExecutor(1)
        self.call = self.pool.submit(say, agent, text, **kwargs)

    def __enter__(self):
        return self.call

    def __exit__(self, *exception):
        self.pool.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_the_engines_call(engine, client, stream):
    session, _ = client.open()
    engine.held.clear()
    with pytest.raises(httpx.ReadTimeout):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        httpx.post(client.url + chat(session), json=body, timeout=0.5)
    wait_until(lambda: len(engine.aborted) == 1 and not engine.waiting)
    assert engine.aborted == [engine.requests[0]["rid"]]
    wait_until(lambda: client.request("GET", f"/sessions/{session}").json()["calls_under_way"] == 0)
    assert client.samples(session) == []


def test_a_client_that_hangs_up_ends_an_evaluation_call(engine, client):
    session, _ = client.open(evaluation=True)
    engine.held.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(client.url + chat(session), content=b"{}", timeout=0.5)
    wait_until(lambda: not engine.waiting)  # its connection was closed


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_session_deleted_under_way_ends_its_calls(engine, client, evaluation):
    session, agent = client.open(evaluation=evaluation)
    engine.held.clear()
    with calling(agent) as call:
        wait_until(lambda: engine.waiting)
        client.request("DELETE", f"/sessions/{session}").raise_for_status()
        with pytest.raises(openai.NotFoundError, match="ended while this call was under way: it was deleted"):
            call.result(10)
    wait_until(lambda: not engine.waiting)
    assert client.request("GET", "/sessions").json()["bytes_held"] == 0


def test_samples_wait_for_calls_under_way(engine, client):
    session, agent = client.open()
    engine.held.clear()
    with calling(agent) as call:
        wait_until(lambda: engine.waiting)
        status, message = client.refused("POST", f"/sessions/{session}/samples")
        assert status == 409 and f"1 calls of session {session} are under way" in message
        engine.held.set()
        call.result(10)
    assert client.samples(session)[0].turns == 1


def test_calls_of_one_session_may_run_side_by_side_as_branches(engine, client):
    session, agent = client.open()
    engine.held.clear()
    with calling(agent, "left") as left:
        wait_until(lambda: engine.waiting == 1)
        with calling(agent, "right") as right:
            wait_until(lambda: engine.waiting == 2)
            engine.held.set()
            left.result(10), right.result(10)
    trained = [sum(sample.loss_mask) for sample in client.samples(session, history="branching")]
    assert trained == [len("left") + 1, len("right") + 1]  # in the order in which the calls came in
    assert client.refused("POST", f"/sessions/{session}/samples")[0] == 422


@pytest.mark.parametrize("limit", ["max_body_bytes", "max_sessions", "max_turns", "max_total_bytes", "max_age", "max_idle"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_a_number_above_0(limit, value):
    with pytest.raises(ValueError, match=f"--{limit.replace('_', '-')} {value}: give a number above 0"):
        SessionLimits(**{limit: value})
