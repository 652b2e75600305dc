"""The session server before a real SGLang server: conversations of OpenAI's client, held against the Hugging Face model."""

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import ClientSettings, EngineClient
from miles_sc.rollout.session import decode_samples
from miles_sc.rollout.session.app import SessionServer, create_app
from miles_sc.rollout.session.continuation import PromptContinuation
from miles_sc.rollout.session.exchange import Recorder
from miles_sc.rollout.session.limits import SessionLimits
from miles_sc.rollout.session.relay import Relay
from tests.live import reference
from tests.rollout.session.serving import served

TOLERANCE = 1e-4
K = 16
MODES = {
    "selected": ScoreCenteringConfig(top_logprobs_num=K, temperature=1.3),
    "support": ScoreCenteringConfig(top_logprobs_num=K, temperature=1.3, top_p=0.9, top_k=12),
    "off": ScoreCenteringConfig(temperature=1.3),
}
OURS = {"extra_body": {"return_prompt_token_ids": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def model(server):
    return reference.load(server.model)


@pytest.fixture
def serve(server, model):
    """``serve(config, own_tokens=...) -> URL`` of a session server."""
    running = []

    def serve(config, *, own_tokens=False):
        continuation = PromptContinuation(AutoTokenizer.from_pretrained(server.model)) if own_tokens else None
        recorder = Recorder(EngineClient(server.url, ClientSettings(attempts=1)), config, model.config.vocab_size, continuation)
        relay = Relay(server.url, timeout=60, connections=8)
        running.append(served(create_app(SessionServer(recorder, relay, SessionLimits()))))
        return running[-1].__enter__()

    yield serve
    for each in running:
        each.__exit__(None, None, None)


def opened(url, **body):
    session = f"{url}/sessions/{httpx.post(f'{url}/sessions', json=body).json()['session_id']}"
    return session, openai.OpenAI(base_url=f"{session}/v1", api_key="unused", max_retries=0, timeout=60)


def conversation(agent, *said, **options):
    """Tokens that the engine saw and sampled, call by call: prompt ids and answer ids."""
    messages, calls = [], []
    for text in said:
        messages.append({"role": "user", "content": text})
        reply = agent.chat.completions.create(model="any", messages=messages, max_tokens=40, **OURS, **options)
        choice = reply.choices[0].model_dump()
        calls.append((choice["prompt_token_ids"], choice["response_token_ids"]))
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return calls


def fetched(session, **body):
    response = httpx.post(f"{session}/samples", json=body)
    assert response.status_code == 200, response.text
    return decode_samples(response.content)


@pytest.mark.parametrize("mode", ["selected", "support"])
def test_a_conversation_is_the_models_own_token_by_token(serve, model, mode):
    config = MODES[mode]
    session, agent = opened(serve(config, own_tokens=True))
    calls = conversation(agent, "3 + 4 =", " 2 + 2 =", " 1 + 5 =")
    assert httpx.get(session).json()["prompts"] == {"new": 1, "continued": 2}
    (sample,) = fetched(session)
    check_alignment(sample, calls)
    trained = np.flatnonzero(sample.loss_mask)
    assert sample.turns == 3 and reference.largest_error(sample, model, config.temperature, trained) < TOLERANCE
    mass = np.exp(sample.rollout_topk_log_probs[trained]).sum(axis=1)
    assert (mass > 0.1).all() and (mass < 1 + 1e-4).all()
    if mode == "support":
        assert mass == pytest.approx(1, abs=1e-4) and sample.rollout_sampling_mask.lengths.max() <= config.top_k
    assert set(sample.weight_versions) <= {"", *httpx.get(session).json()["weight_versions"]}


def check_alignment(sample, calls):
    """Every prompt that the engine saw is the sample's beginning, and what it answered stands there, trained, unless dropped."""
    mask = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    for prompt, answer in calls:
        assert sample.tokens[: len(prompt)] == prompt
        kept = answer if prompt is calls[-1][0] else answer[:-1]
        assert sample.tokens[len(prompt) : len(prompt) + len(kept)] == kept
        assert mask[len(prompt) : len(prompt) + len(kept)] == [1] * len(kept)
    assert sum(mask) >= sum(len(answer) for _, answer in calls) - len(calls) + 1


@pytest.mark.parametrize("mode", ["selected", "support", "off"])
def test_turns_that_the_engine_rendered_are_samples_at_least_of_their_own(serve, model, mode):
    config = MODES[mode]
    session, agent = opened(serve(config))
    calls = conversation(agent, "3 + 4 =", " 2 + 2 =")
    samples = fetched(session, history="branching")
    assert sum(sample.turns for sample in samples) == 2
    for sample in samples:
        assert any(sample.tokens[: len(prompt)] == prompt for prompt, _ in calls)
        if mode == "off":
            assert sample.candidates is None and len(sample.rollout_log_probs) == sample.response_length
        else:
            assert reference.largest_error(sample, model, config.temperature, np.flatnonzero(sample.loss_mask)) < TOLERANCE


def test_a_stream_and_log_probs_of_a_recorded_call(serve):
    session, agent = opened(serve(MODES["selected"]))
    asked = {"model": "any", "messages": [{"role": "user", "content": "3 + 4 ="}], "max_tokens": 6}
    asked |= {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    chunks = list(agent.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    (sample,) = fetched(session)
    content = next(chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices and chunk.choices[0].logprobs)
    assert chunks[-1].usage.completion_tokens == len(content) == sample.response_length == 6
    assert [token.logprob for token in content] == pytest.approx(sample.rollout_log_probs)
    for token, row in zip(content, sample.rollout_topk_log_probs, strict=True):
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(row[:3].tolist())


def test_evaluation_is_greedy_if_it_wants_to_be(serve):
    session, agent = opened(serve(MODES["selected"]), evaluation=True)
    asked = {"model": "any", "messages": [{"role": "user", "content": "3 + 4 ="}], "max_tokens": 6, "temperature": 0}
    first, second = (agent.chat.completions.create(**asked).choices[0].message.content for _ in range(2))
    streamed = [chunk.choices[0].delta.content or "" for chunk in agent.chat.completions.create(**asked, stream=True)]
    assert first == second == "".join(streamed)
    assert httpx.post(f"{session}/samples").status_code == 409


def test_the_engines_refusal_reaches_the_client(serve):
    _, agent = opened(serve(MODES["selected"]))
    with pytest.raises(openai.BadRequestError, match="max_new_tokens must be at least 0"):
        agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}], max_tokens=-4)
