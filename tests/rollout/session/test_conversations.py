"""Whole conversations of OpenAI's own client: what is recorded, what it is told, what a trainer gets."""

import numpy as np
import openai
import pytest

from tests.rollout.session.chat_engine import EOS, VOCAB, encode, log_q
from tests.rollout.session.conftest import K, say

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "content": "so ",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}


def test_a_conversation_with_a_tool_becomes_one_sample(engine, client):
    session, agent = client.open()
    engine.words = [CALL, "five"]
    messages = [{"role": "user", "content": "2+3"}]
    reply = agent.chat.completions.create(model="stub", messages=messages, tools=[TOOL])
    call = reply.choices[0].message.tool_calls[0]
    assert (call.function.name, reply.choices[0].finish_reason) == ("add", "tool_calls")
    messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    assert agent.chat.completions.create(model="stub", messages=messages, tools=[TOOL]).choices[0].message.content == "five"

    (sample,) = client.samples(session)
    first, observed, second = encode("so <add>"), encode("[tool]5[assistant]"), encode("five") + [EOS]
    assert sample.tokens == encode("[user]2+3[assistant]") + first + observed + second
    assert sample.loss_mask == [1] * len(first) + [0] * len(observed) + [1] * len(second)
    assert (sample.turns, sample.truncated, sample.aborted) == (2, False, False)
    assert sample.weight_versions == ["7"] * len(first) + [""] * len(observed) + ["7"] * len(second)
    check_rows(sample, [*first], 0)
    check_rows(sample, second, len(first) + len(observed))
    gap = slice(len(first), len(first) + len(observed))
    assert (sample.rollout_topk_token_ids[gap] == -1).all() and np.isneginf(sample.rollout_topk_log_probs[gap]).all()
    assert sample.rollout_log_probs[gap] == [0.0] * len(observed)


def check_rows(sample, tokens, start):
    """The rows are the engine's, place by place."""
    for place, token in enumerate(tokens):
        row = log_q(token, place)
        order = np.argsort(-row, kind="stable")[:K]
        np.testing.assert_array_equal(sample.rollout_topk_token_ids[start + place], order)
        np.testing.assert_array_equal(sample.rollout_topk_log_probs[start + place], row[order])
        assert sample.rollout_log_probs[start + place] == pytest.approx(float(row[token]))


def test_filtered_sampling_records_the_support(engine, serve):
    client = serve(top_k=8)
    session, agent = client.open()
    say(agent, "more", say(agent, "hi"))
    (sample,) = client.samples(session)
    trained = np.array(sample.loss_mask, bool)
    assert (sample.rollout_sampling_mask.lengths[~trained] == 1).all()
    assert np.exp(sample.rollout_topk_log_probs[trained]).sum(1) == pytest.approx(1)
    assert sample.rollout_sampling_mask.padded(K)[trained].tolist() == sample.rollout_topk_token_ids[trained].tolist()
    assert {request["sampling_logprobs_mode"] for request in engine.requests} == {"support"}


@pytest.mark.parametrize("k", [0, K])
def test_the_client_is_told_no_more_than_it_asked_for(engine, serve, k):
    client = serve(top_logprobs_num=k)
    session, agent = client.open()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    reply = client.request("POST", f"/sessions/{session}/v1/chat/completions", json=body).json()
    message = {"role": "assistant", "content": "hi"}
    assert reply["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage"}


def test_log_probs_come_in_the_clients_own_number(client):
    _, agent = client.open()
    reply = agent.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert [token.token for token in content] == ["h", "i", "<eos>"]
    row = log_q(encode("i")[0], 1)
    assert [top.logprob for top in content[1].top_logprobs] == np.sort(row)[::-1][:3].astype(float).tolist()
    assert content[1].logprob == float(row[encode("i")[0]])


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_client_that_asks_for_sglangs_fields_gets_them_without_the_candidates(client, logprobs):
    _, agent = client.open()
    extra = {"return_meta_info": True, "return_prompt_token_ids": True}
    messages = [{"role": "user", "content": "hi"}]
    reply = agent.chat.completions.create(model="stub", messages=messages, logprobs=logprobs, extra_body=extra)
    choice = reply.choices[0].model_dump()
    assert choice["prompt_token_ids"] == encode("[user]hi[assistant]")
    assert set(choice["meta_info"]) - {"output_token_logprobs"} == {
        "id", "finish_reason", "completion_tokens", "weight_version"
    }  # fmt: skip
    assert ("output_token_logprobs" in choice["meta_info"]) == logprobs == (choice["logprobs"] is not None)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_tells_what_the_whole_answer_tells(engine, client, usage, logprobs):
    _, agent = client.open()
    engine.words = [CALL, CALL]
    options = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "logprobs": logprobs}
    whole = agent.chat.completions.create(**options)
    with agent.chat.completions.stream(**options, stream_options={"include_usage": usage}) as stream:
        assembled = stream.get_final_completion()
    assert assembled.choices[0].message.content == whole.choices[0].message.content == "so "
    told, calls = whole.choices[0].message.tool_calls, assembled.choices[0].message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [("c1", "add", "{}")]
    assert [(c.id, c.function.name, c.function.arguments) for c in told] == [("c1", "add", "{}")]
    assert assembled.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert (assembled.usage == whole.usage) == usage and (assembled.usage is None) != usage
    if logprobs:
        assert assembled.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert not any("stream" in request or "stream_options" in request for request in engine.requests)


def test_streamed_turns_are_recorded_and_continued(client):
    session, agent = client.open()
    messages = [{"role": "user", "content": "hi"}]
    words = [
        chunk.choices[0].delta.content or ""
        for chunk in agent.chat.completions.create(model="stub", messages=messages, stream=True)
    ]
    say(agent, "more", [*messages, {"role": "assistant", "content": "".join(words)}], stream=False)
    (sample,) = client.samples(session)
    assert sample.turns == 2 and sample.tokens[-5:] == encode("more") + [EOS]


def test_branches_become_samples_that_share_no_trained_token(client):
    session, agent = client.open()
    common = say(agent, "hi")
    say(agent, "left", common)
    say(agent, "right", common)
    status, message = client.refused("POST", f"/sessions/{session}/samples")
    assert status == 422 and "turn 3 does not continue turn 2" in message and '"history": "branching"' in message
    left, right = client.samples(session, history="branching")
    assert [left.turns, right.turns] == [2, 1]
    assert sum(left.loss_mask) == len("hi" + "left") + 1 and sum(right.loss_mask) == len("right") + 1
    assert right.tokens[: -right.response_length] == encode("[user]hi[assistant]hi[user]right[assistant]")


def test_a_history_tokenised_anew_is_refused_with_both_tokens(engine, client):
    session, agent = client.open()
    engine.words = ["cab"]
    say(agent, "more", say(agent, "hi"))
    status, message = client.refused("POST", f"/sessions/{session}/samples")
    position = len("[user]hi[assistant]c")
    assert status == 422
    assert f"at position {position}, within that turn's answer, it had token {encode('a')[0]}" in message
    assert "the prompt of turn 2 has token 299" in message and "tokenised anew" in message
    assert [sample.turns for sample in client.samples(session, history="branching")] == [1, 1]


@pytest.mark.parametrize("history", [None, "tree", 3])
def test_an_unknown_history_is_refused(client, history):
    session, _ = client.open()
    status, message = client.refused("POST", f"/sessions/{session}/samples", json={"history": history})
    assert status == 422 and f"history = {history!r}" in message


def test_the_count_of_dropped_tokens_is_told(client):
    session, agent = client.open()
    say(agent, "more", say(agent, "hi"))
    response = client.request("POST", f"/sessions/{session}/samples")
    assert response.headers["x-dropped-tokens"] == "1"  # the first turn's stop, which the template leaves out


def test_a_session_tells_what_it_holds(engine, client):
    session, agent = client.open()
    messages = say(agent, "hi")
    engine.version = "8"
    say(agent, "more", messages)
    told = client.request("GET", f"/sessions/{session}").json()
    assert (told["turns"], told["generated_tokens"], told["weight_versions"]) == (2, 8, ["7", "8"])
    assert client.request("GET", "/sessions").json()["sessions"] == 1
    assert told["bytes_held"] == client.request("GET", "/sessions").json()["bytes_held"] > 8 * K * 8
    assert (told["evaluation"], told["calls_under_way"]) == (False, 0) and told["age"] >= told["idle"] >= 0
    deleted = client.request("DELETE", f"/sessions/{session}").json()
    assert deleted == {"deleted": session, "turns": 2, "bytes_freed": told["bytes_held"]}
    assert client.request("GET", "/sessions").json()["bytes_held"] == 0


def test_an_empty_session_gives_no_samples(client):
    session, _ = client.open()
    assert client.samples(session) == []


def test_the_models_are_the_engines(client):
    _, agent = client.open()
    assert [model.id for model in agent.models.list()] == ["stub"]


def test_the_producers_vocabulary_bounds_the_tokens(engine, client):
    session, agent = client.open()
    engine.spoil = lambda answer: answer["choices"][0].update(prompt_token_ids=[VOCAB])
    with pytest.raises(openai.APIStatusError, match=f"token {VOCAB} is outside the vocabulary of {VOCAB}"):
        say(agent, "hi")
