"""What goes wrong, over HTTP: the status, our text, OpenAI's shape."""

import openai
import pytest

from miles_sc.rollout.engines.sglang.client import ClientSettings
from tests.rollout.session.chat_engine import FORCED
from tests.rollout.session.conftest import K, say
from tests.rollout.session.test_continuation import Tokenizer, template


def failing(agent, error=openai.APIStatusError, **kwargs):
    """The error that OpenAI's client raises for one call."""
    with pytest.raises(error) as raised:
        say(agent, "hi", **kwargs)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 2}, "n = 2: a session's turn has one answer"),
        ({"temperature": 0.1}, "the trainer scores at --rollout-temperature 1.0"),
        ({"extra_body": {"min_p": 0.5}}, "min_p = 0.5"),
        ({"extra_body": {"ebnf": "x"}}, "ebnf = 'x'"),
    ],
)
def test_a_refused_request_never_reaches_the_engine(engine, client, fields, message):
    session, agent = client.open()
    error = failing(agent, openai.BadRequestError, **fields)
    assert message in error.message and error.code == "refused" and error.type == "invalid_request_error"
    assert not engine.bodies and client.request("GET", f"/sessions/{session}").json()["turns"] == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda choice: choice.pop("meta_info"), "meta_info is missing"),
        (lambda choice: choice.pop("prompt_token_ids"), "prompt_token_ids is missing"),
        (lambda choice: choice["meta_info"].update(output_top_logprobs_shape=[3, 12]), "12 candidates came and 20 were asked"),
        (lambda choice: choice["meta_info"].update(completion_tokens=9), "has 3 rows for 9 generated tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_cannot_be_recorded_fails_and_leaves_nothing(engine, client, spoil, message, stream):
    session, agent = client.open()
    engine.spoil = lambda answer: spoil(answer["choices"][0])
    error = failing(agent, stream=stream)
    assert error.status_code == 502 and message in error.message and error.code == "not_recorded"
    assert len(engine.bodies) == 1  # OpenAI's client was told not to try again
    engine.spoil = lambda answer: None
    say(agent, "hi")
    (sample,) = client.samples(session)
    assert sample.turns == 1


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [(400, 400, "engine_refused"), (422, 422, "engine_refused"), (401, 502, "engine_failed"), (404, 502, "engine_failed"),
     (500, 502, "engine_failed"), (503, 503, "engine_busy"), (429, 503, "engine_busy"), (504, 504, "engine_timeout")],
)  # fmt: skip
def test_an_engines_refusal_is_told_with_its_words(engine, client, status, told, code):
    _, agent = client.open()
    engine.status, engine.refusal = status, "no more than 20 of them"
    error = failing(agent.with_options(max_retries=0))
    assert (error.status_code, error.code) == (told, code) and "no more than 20 of them" in error.message
    assert (f"top_logprobs = {K}" in error.message) == (code == "engine_refused")


@pytest.mark.parametrize(
    ("own", "status"), [({}, 502), ({"logprobs": True, "top_logprobs": K}, 400), ({"logprobs": True, "top_logprobs": 3}, 502)]
)
def test_a_router_that_allows_fewer_candidates_is_no_fault_of_the_clients(engine, client, own, status):
    _, agent = client.open()
    engine.status, engine.refusal = 400, "top_logprobs: at most 10"
    error = failing(agent, **own)
    assert error.status_code == status and "top_logprobs: at most 10" in error.message
    assert ("update the router" in error.message) == (status == 502)


def test_a_refusal_does_not_repeat_the_prompts_tokens(engine, serve):
    client = serve(tokenizer=Tokenizer(template()))
    _, agent = client.open()
    messages = say(agent, "hi" * 1000)
    engine.status = 400
    error = failing(agent, before=messages)
    assert "input_ids, " not in error.message and f"{len(engine.requests[1]['input_ids'])} input_ids" in error.message
    assert len(error.message) < 1000


def test_an_engine_that_does_not_answer_in_time_is_a_504(engine, serve):
    client = serve(client=ClientSettings(attempts=1, request_timeout=0.2))
    engine.held.clear()
    for body in ({}, {"evaluation": True}):
        _, agent = client.open(**body)
        error = failing(agent.with_options(timeout=5))
        assert error.status_code == 504 and "no answer within 0.2 s" in error.message


def test_an_engine_that_is_not_there_is_a_502(engine, serve):
    engine.url = "http://127.0.0.1:9"
    client = serve()
    for body in ({}, {"evaluation": True}):
        _, agent = client.open(**body)
        error = failing(agent)
        assert error.status_code == 502 and "127.0.0.1:9/v1/chat/completions" in error.message


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")],
)
def test_an_unknown_session_is_a_404(client, method, path):
    status, message = client.refused(method, f"/sessions/abc{path}")
    assert status == 404 and message.startswith("no session abc: it never was opened here") and "POST /sessions" in message


def test_a_deleted_session_says_so(client):
    session, agent = client.open()
    client.request("DELETE", f"/sessions/{session}")
    assert "it has ended: it was deleted" in failing(agent, openai.NotFoundError).message
    assert client.refused("DELETE", f"/sessions/{session}")[0] == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON"),
        (b'{"a": NaN}', "the body is no JSON"),
        (b"[]", "the body is a JSON list: send an object"),
        (b"[" * 5000, "the body is no JSON"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "nested too deeply"),
    ],
)
@pytest.mark.parametrize("path", ["/sessions", "/sessions/{}/samples", "/sessions/{}/v1/chat/completions"])
def test_what_is_no_object_is_refused(client, path, body, message):
    session, _ = client.open()
    status, told = client.refused("POST", path.format(session), content=body)
    assert status == 400 and message in told


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/sessions", {"evaluation": 1}, "evaluation = 1: give true or false"),
        ("/sessions", {"eval": True}, r"unknown fields ['eval']: this call takes evaluation"),
        ("/sessions/{}/samples", {"shape": "tree"}, r"unknown fields ['shape']: this call takes history"),
    ],
)
def test_unknown_fields_are_refused(client, path, body, message):
    session, _ = client.open()
    status, told = client.refused("POST", path.format(session), json=body)
    assert status == 400 and message in told


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("PUT", "/sessions"), ("POST", "/v1/chat/completions")])
def test_other_routes_are_named(client, method, path):
    status, message = client.refused(method, path)
    assert status in (404, 405) and f"{method} {path}: " in message and "POST /sessions/ID/v1/chat/completions" in message


def test_a_key_is_wanted_where_one_is_set(serve):
    client = serve(api_key="s3cret")
    assert client.request("GET", "/health").json() == {"status": "ok"}
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer schlüssel".encode()}):
        status, message = client.refused("POST", "/sessions", headers=headers)
        assert status == 401 and "API key is missing or wrong" in message
    headers = {"Authorization": "Bearer s3cret"}
    session = client.request("POST", "/sessions", headers=headers).json()["session_id"]
    assert failing(client.agent(session), openai.AuthenticationError).code == "no_key"
    say(client.agent(session).with_options(api_key="s3cret"), "hi")


# --- evaluation


def test_an_evaluation_call_passes_through_byte_for_byte(engine, client):
    session, agent = client.open(evaluation=True)
    body = b'{"messages":[ {"role":"user","content":"hi"}],  "temperature":0.0, "min_p":0.5, "n":1}'
    response = client.request("POST", f"/sessions/{session}/v1/chat/completions", content=body)
    assert engine.bodies == [body] and response.json() == engine.answers[0]
    assert not set(FORCED) & set(engine.requests[0])
    say(agent, "hi", temperature=0)
    assert client.request("GET", f"/sessions/{session}").json()["bytes_held"] == 0
    status, message = client.refused("POST", f"/sessions/{session}/samples")
    assert status == 409 and "is for evaluation: nothing was recorded" in message


def test_an_evaluation_call_may_stream(client):
    _, agent = client.open(evaluation=True)
    assert len(list(agent.chat.completions.create(model="stub", messages=[{"role": "user", "content": "hi"}], stream=True))) == 1


def test_an_evaluation_call_is_told_the_engines_own_refusal(engine, client):
    session, _ = client.open(evaluation=True)
    engine.status, engine.refusal = 418, "teapot"
    response = client.request("POST", f"/sessions/{session}/v1/chat/completions", content=b"{}")
    assert (response.status_code, response.text) == (418, "teapot")


@pytest.mark.parametrize("own", [{}, {"temperature": 0.2, "min_p": 0.1}])
def test_without_recording_the_forwarded_request_is_the_clients(engine, serve, own):
    client = serve(top_logprobs_num=0)
    session, agent = client.open()
    say(agent, "hi", extra_body=own)
    sent = engine.requests[0]
    assert sent.pop("rid") and {name: sent.pop(name) for name in FORCED} == dict.fromkeys(FORCED, True)
    assert sent == {"model": "stub", "messages": [{"role": "user", "content": "hi"}]} | own
    (sample,) = client.samples(session)
    assert sample.candidates is None and len(sample.rollout_log_probs) == 3
