"""Histories that go on with the tokens that were sampled, whatever their text would be tokenised to."""

import jinja2
import pytest

from tests.rollout.session.chat_engine import EOS, decode, encode
from tests.rollout.session.conftest import say

BODY = "{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}"
FRAME = "{% if add_generation_prompt %}[assistant]{% endif %}"


def template(ending=""):
    return "{% for m in messages %}[{{ m.role }}]" + BODY + ending + "{% endfor %}" + FRAME


# how a template ends a message, and what stands between an answer's words and the next message in the prompt
ENDINGS = {"": [], "<eos>": [EOS], "<eos>\n": [EOS, *encode("\n")], ";": encode(";")}
CALL = {
    "role": "assistant",
    "content": "cab",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
}


class Tokenizer:
    """The scripted engine's, with a template of its own."""

    def __init__(self, template):
        self._template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(template)

    def apply_chat_template(self, conversation, *, tokenize, tools, add_generation_prompt, **kwargs):
        assert not tokenize
        return self._template.render(
            messages=[{"tool_calls": None} | message for message in conversation],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **kwargs,
        )

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return encode(text)

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(decode, token_ids))


def prompts(client, session):
    return client.request("GET", f"/sessions/{session}").json()["prompts"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_goes_on_as_it_was_sampled(engine, serve, ending, finish):
    client = serve(tokenizer=Tokenizer(template(ending)))
    session, agent = client.open()
    engine.words, engine.finish = ["cab", "abc"], finish
    say(agent, "third", say(agent, "second", say(agent, "first")))
    stop = [EOS] if finish == "stop" else []
    told = encode("cab", merge=False) + (stop if not ending.startswith("<eos>") and finish == "length" else [])
    told += ENDINGS[ending]
    first = encode("[user]first[assistant]")
    assert engine.requests[1]["input_ids"] == first + told + encode("[user]second" + ending + "[assistant]")
    assert prompts(client, session) == {"new": 1, "continued": 2} == client.request("GET", "/sessions").json()["prompts"]
    (sample,) = client.samples(session)
    assert sample.turns == 3 and sum(sample.loss_mask) >= len("cab" + "abc" + "third")


def test_without_a_tokenizer_the_same_history_breaks(engine, client):
    session, agent = client.open()
    engine.words = ["cab"]
    say(agent, "more", say(agent, "hi"))
    assert prompts(client, session) == {"rendered": 2}
    assert client.refused("POST", f"/sessions/{session}/samples")[0] == 422


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_a_tools_answer_go_on(engine, serve, ending, stream):
    client = serve(tokenizer=Tokenizer(template(ending)))
    session, agent = client.open()
    engine.words = [CALL, "five"]
    options = {"model": "stub", "tools": [{"type": "function", "function": {"name": "add"}}]}
    asked = {"role": "user", "content": "2+3"}
    if stream:
        with agent.chat.completions.stream(messages=[asked], **options) as events:
            reply = events.get_final_completion().choices[0].message
        messages = [asked, reply.model_dump(exclude={"parsed"}), {"role": "tool", "tool_call_id": "c1", "content": "5"}]
        for call in messages[1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
    else:
        reply = agent.chat.completions.create(messages=[asked], **options).choices[0].message
        messages = [asked, reply, {"role": "tool", "tool_call_id": "c1", "content": "5"}]
    agent.chat.completions.create(messages=messages, **options)
    assert prompts(client, session) == {"new": 1, "continued": 1}
    (sample,) = client.samples(session)
    answer = encode("[user]2+3[assistant]") + encode("cab<add>", merge=False)
    assert sample.tokens[: len(answer)] == answer
    assert sample.tokens[len(answer) :] == ENDINGS[ending] + encode("[tool]5" + ending + "[assistant]") + encode("five") + [EOS]


def test_branches_go_on_from_their_own_answer(engine, serve):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    engine.words = ["ab", "b", "ab", "x", "y"]
    left, right = say(agent, "hi"), say(agent, "hi")
    for history in (left, right, left):
        say(agent, "more", history)
    assert prompts(client, session) == {"new": 2, "continued": 3}
    for request, words in zip(engine.requests[2:], ["ab", "b", "ab"], strict=True):
        told = encode("[user]hi[assistant]") + encode(words, merge=False) + encode("[user]more[assistant]")
        assert request["input_ids"] == told
    assert [sample.turns for sample in client.samples(session, history="branching")] == [2, 2, 1]


def test_a_client_may_leave_out_thoughts_and_empty_fields(engine, serve):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    engine.words = [{"role": "assistant", "content": "ab", "reasoning_content": "hm"}]
    messages = say(agent, "hi")
    messages[-1] = {"role": "assistant", "content": "ab", "refusal": None, "tool_calls": []}
    say(agent, "more", messages)
    assert prompts(client, session) == {"new": 1, "continued": 1}


ROLLING = "{{ messages | length }}" + template()
FAILING = "{% if messages | length > 2 %}{{ nothing }}{% endif %}" + template()
SILENT = "{% for m in messages %}[{{ m.role }}]{{ m.content if m.role == 'user' }}{% endfor %}[assistant]"
ROUNDED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '.' if loop.last and m.role == 'assistant' }}{% endfor %}" + FRAME
)
TWO_ENDINGS = (
    "{% for m in messages %}[{{ m.role }}]"
    + BODY
    + "{{ '?' if m.tool_calls else ';' if m.role == 'assistant' }}{% endfor %}"
    + FRAME
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ROLLING, "the chat template renders earlier messages otherwise now"),
        (SILENT, "the chat template does not show an answer's words"),
        (ROUNDED, "the chat template does not show where an answer ends"),
        (FAILING, "the chat template fails on it (UndefinedError)"),
    ],
)
def test_a_template_that_does_not_extend_leaves_the_prompt_to_the_engine(engine, serve, template, reason):
    client = serve(tokenizer=Tokenizer(template))
    session, agent = client.open()
    say(agent, "more", say(agent, "hi"))
    assert prompts(client, session) == {"new": 1, f"rendered: {reason}": 1}
    assert "input_ids" not in engine.requests[1]
    assert client.samples(session)[0].turns == 2  # the engine's own prompt happens to continue


def test_calls_whose_end_is_not_shown_are_rendered(engine, serve):
    client = serve(tokenizer=Tokenizer(TWO_ENDINGS))
    session, agent = client.open()
    engine.words = [CALL]
    say(agent, "more", say(agent, "hi"))
    assert prompts(client, session) == {"new": 1, "rendered: the chat template does not show where an answer ends": 1}


def test_calls_may_end_in_a_stop_of_their_own(engine, serve):
    client = serve(tokenizer=Tokenizer(TWO_ENDINGS.replace("?", "<eos>")))
    session, agent = client.open()
    engine.words = [CALL]
    say(agent, "more", say(agent, "hi"))
    assert prompts(client, session) == {"new": 1, "continued": 1}
    told = encode("[user]hi[assistant]") + encode("cab<add>", merge=False) + [EOS] + encode("[user]more[assistant]")
    assert engine.requests[1]["input_ids"] == told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[1].update(content="AB"), "no recorded answer stands in it as it was given"),
        (lambda m: m[1].update(name="Bo"), "no recorded answer stands in it as it was given"),
        (lambda m: m[0].update(content="ho"), "no recorded answer stands in it as it was given"),
        (lambda m: m.append({"role": "assistant", "content": "so"}), "its last message is an answer, to be gone on with"),
        (lambda m: m[2].update(content=[{"type": "text", "text": "x"}]),
         "a message comes in parts, which engines join in ways of their own"),
    ],
)  # fmt: skip
def test_a_history_that_is_not_the_recorded_one_is_rendered(engine, serve, change, reason):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    messages = [*say(agent, "hi"), {"role": "user", "content": "more"}]
    change(messages)
    engine.words = ["fine"]
    agent.chat.completions.create(model="stub", messages=messages)
    assert prompts(client, session) == {"new": 1, f"rendered: {reason}": 1}


@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_another_rendering_is_another_conversation(engine, serve, field):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    other = {"tools": [{"type": "function", "function": {"name": "add"}}]} if field == "tools" else {field: {"a": 1}}
    say(agent, "more", say(agent, "hi"), extra_body=other)
    assert prompts(client, session) == {"new": 1, "rendered: no recorded answer stands in it as it was given": 1}


def test_a_clients_own_tokens_are_left_alone(engine, serve):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    messages = say(agent, "hi", extra_body={"input_ids": [5, 6]})
    say(agent, "more", messages, extra_body={"input_ids": [5, 6, *encode("hi"), 9]})
    assert prompts(client, session) == {"the client's own": 2}
    assert client.samples(session)[0].tokens[:2] == [5, 6]


def test_an_engine_that_ignores_the_tokens_is_found_out(engine, serve):
    client = serve(tokenizer=Tokenizer(template()))
    session, agent = client.open()
    messages = say(agent, "hi")
    engine.spoil = lambda answer: answer["choices"][0]["prompt_token_ids"].append(7)
    status, message = client.refused(
        "POST",
        f"/sessions/{session}/v1/chat/completions",
        json={"messages": [*messages, {"role": "user", "content": "more"}]},
    )
    assert status == 502 and "does not know input_ids on chat" in message and "--tokenizer" in message
