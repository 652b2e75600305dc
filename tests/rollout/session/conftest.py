"""A scripted engine and session servers before it, all on real sockets."""

import contextlib

import httpx
import openai
import pytest

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient
from miles_sc.rollout.session import decode_samples
from miles_sc.rollout.session.app import SessionServer, create_app
from miles_sc.rollout.session.continuation import PromptContinuation
from miles_sc.rollout.session.exchange import Recorder
from miles_sc.rollout.session.limits import SessionLimits
from miles_sc.rollout.session.relay import Relay
from tests.rollout.session.chat_engine import VOCAB, ChatEngine
from tests.rollout.session.serving import served

K = 20


class Client:
    """A trainer and an agent in one."""

    def __init__(self, url, server):
        self.url, self.server = url, server

    def request(self, method, path, **kwargs):
        return httpx.request(method, self.url + path, timeout=30, **kwargs)

    def open(self, **body):
        """A session's id and OpenAI's client for it."""
        session = self.request("POST", "/sessions", json=body).raise_for_status().json()["session_id"]
        return session, self.agent(session)

    def agent(self, session, **kwargs):
        return openai.OpenAI(base_url=f"{self.url}/sessions/{session}/v1", api_key="unused", timeout=30, **kwargs)

    def samples(self, session, **body):
        response = self.request("POST", f"/sessions/{session}/samples", json=body)
        assert response.status_code == 200, response.text
        return decode_samples(response.content)

    def refused(self, method, path, **kwargs):
        """Status and message of a call that must fail."""
        response = self.request(method, path, **kwargs)
        return response.status_code, response.json()["error"]["message"]


@pytest.fixture(scope="module")
def running_engine():
    engine = ChatEngine()
    with served(engine.app) as url:
        yield engine, url


@pytest.fixture
def engine(running_engine):
    engine, engine.url = running_engine
    engine.reset()
    yield engine
    engine.held.set()


@pytest.fixture
def serve(engine):
    """``serve(limits=..., api_key=..., **sampler) -> Client`` of a new session server."""
    with contextlib.ExitStack() as running:

        def serve(*, limits=None, api_key=None, client=None, tokenizer=None, **sampler):
            config = ScoreCenteringConfig(**{"top_logprobs_num": K} | sampler)
            patience = client or ClientSettings(attempts=1)
            relay = Relay(engine.url, timeout=patience.request_timeout, connections=64)
            continuation = tokenizer and PromptContinuation(tokenizer)
            recorder = Recorder(EngineClient(engine.url, patience), config, VOCAB, continuation)
            server = SessionServer(recorder, relay, limits or SessionLimits(), api_key=api_key)
            return Client(running.enter_context(served(create_app(server))), server)

        yield serve


@pytest.fixture
def client(serve):
    return serve()


def say(agent, text, before=(), **kwargs):
    """One call; the messages with the answer, to go on from."""
    messages = [*before, {"role": "user", "content": text}]
    reply = agent.chat.completions.create(model="stub", messages=messages, **kwargs)
    return [*messages, reply.choices[0].message.model_dump(exclude_none=True)]
