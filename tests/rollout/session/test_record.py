"""One answer read into one turn, and every answer that cannot be trained on."""

import pytest

from miles_sc.rollout.session.record import read_turn
from tests.rollout.session.chat_engine import EOS, VOCAB, encode
from tests.rollout.session.turns import K, answer, config, turn


def test_a_turn_holds_the_engines_tokens():
    recorded = turn("u:", "xy", 3)
    assert (recorded.arrival, recorded.droppable) == (3, 1)
    assert recorded.prompt_ids.tolist() == encode("u:") and recorded.prompt_ids.dtype.name == "int32"
    assert recorded.token_ids.tolist() == encode("u:xy") + [EOS]
    assert recorded.generated.candidates.token_ids.shape == (3, K)


@pytest.mark.parametrize(("mode", "k"), [("selected", K), ("support", K), ("selected", 0)])
def test_a_turn_counts_its_bytes(mode, k):
    recorded = turn("u:", "xy", mode=mode, k=k)
    rows, support = 3, recorded.generated.support
    in_support = 4 * support.ids.size + 8 * (rows + 1) if mode == "support" else 0
    assert recorded.nbytes == 2 * 4 + rows * (8 + 8 + 8 + 8 * k) + in_support


@pytest.mark.parametrize(
    ("matched", "texts", "droppable"),
    [
        (EOS, ["x", "<eos>"], 1),
        (EOS, [" ", "\n", "<eos>"], 3),
        ("</t>", ["x", "</", "t", ">"], 3),
        ("</t>", ["x", "y</", "t>"], 2),
        ("</t>", ["x", " ", "</t>"], 2),
        ("</t>", ["x", None, "y"], 0),
        (EOS, ["x", None, "<eos>"], 1),
        (EOS, ["x", "y"], 0),  # the engine kept it to itself
        (None, ["x", "\n"], 1),
    ],
)
def test_a_template_may_leave_out_the_stop_and_white_space_before_it(matched, texts, droppable):
    spoiled = answer("u", "x" * len(texts), finish="length", k=0)
    meta = spoiled["choices"][0]["meta_info"]
    meta["finish_reason"] = {"type": "stop", "matched": matched}
    for entry, text in zip(meta["output_token_logprobs"], texts, strict=True):
        entry[1:] = [EOS if text == "<eos>" else entry[1], text]
    assert read_turn(spoiled, config(k=0), vocab_size=VOCAB, arrival=0).droppable == droppable


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a.pop("choices"), "choices: None came and exactly one"),
        (lambda a: a.update(choices=[]), "choices: 0 came and exactly one"),
        (lambda a: a["choices"].append({}), "choices: 2 came and exactly one"),
        (lambda a: a.update(choices=["x"]), "choices: 1 came and exactly one"),
        (lambda a: a["choices"][0].pop("meta_info"), "meta_info is missing.*router"),
        (lambda a: a["choices"][0].pop("prompt_token_ids"), "prompt_token_ids is missing.*0.5.23"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[]), "prompt_token_ids = .*at least one"),
        (lambda a: a["choices"][0].update(prompt_token_ids="1 2"), "prompt_token_ids = 1 2: wanted a list"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[1.5]), "prompt_token_ids = .*wanted a list"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[1, -2]), "position 1: token -2 is outside"),
        (lambda a: a["choices"][0].update(prompt_token_ids=[1, VOCAB]), f"position 1: token {VOCAB} is outside"),
        (lambda a: _meta(a).update(finish_reason={"type": "bored"}), "finish_reason = .*only stop, length and abort"),
        (lambda a: _meta(a).pop("finish_reason"), "finish_reason = None"),
        (lambda a: _meta(a).update(output_top_logprobs=[row[:3] for row in _meta(a)["output_top_logprobs"]]),
         f"3 candidates came and {K} were asked for.*router that allows 20"),
        (lambda a: _meta(a).pop("output_top_logprobs"), f"output_top_logprobs is missing: {K} candidates"),
        (lambda a: _meta(a)["output_top_logprobs"].pop(), "has 2 rows for 3 generated tokens"),
        (lambda a: _meta(a).pop("output_token_logprobs"), "output_token_logprobs is missing"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_trained_on_is_refused(spoil, message):
    spoiled = answer("u:", "xy")
    spoil(spoiled)
    with pytest.raises(ValueError, match=message):
        read_turn(spoiled, config(), vocab_size=VOCAB, arrival=0)


def _meta(spoiled):
    return spoiled["choices"][0]["meta_info"]


def test_ids_are_unbounded_without_a_vocabulary():
    spoiled = answer("u", "x", k=0)
    spoiled["choices"][0]["prompt_token_ids"] = [10**6]
    assert read_turn(spoiled, config(k=0), vocab_size=None, arrival=0).prompt_ids.tolist() == [10**6]
