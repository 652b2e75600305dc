"""The probe against an engine that is honest, behind layers that each break one thing: verdict and remedy name it."""

import asyncio
import itertools
import math
import re

import numpy as np
import pytest

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import EngineError
from miles_sc.rollout.probe import Finding, Verdict, probe_chat, probe_native, raise_on_failure
from miles_sc.rollout.probe.distribution import EXPONENT_TOLERANCE, GOOD_FIT, SAME_HEAD, head_distance, temperature_exponent
from tests.rollout import bad_routes as bad
from tests.rollout.tiny_model import TRUE_VOCAB

SELECTED = ScoreCenteringConfig(top_logprobs_num=32)
SUPPORT = ScoreCenteringConfig(top_logprobs_num=32, temperature=0.8, top_k=16)
FILTERED = ScoreCenteringConfig(top_logprobs_num=32, temperature=0.8, top_p=0.9, top_k=16)
ONE = ScoreCenteringConfig(top_logprobs_num=1, temperature=1.7)
OFF = ScoreCenteringConfig()
OK, NOTE, FAILED, UNKNOWN = Verdict


@pytest.fixture(scope="module")
def engine():
    return bad.HonestEngine()


def probe(engine, layer=None, config=SELECTED, *, chat=False, vocab_size=TRUE_VOCAB):
    """Check -> finding."""
    ask = bad.asking(engine, layer)
    if chat:
        findings = asyncio.run(probe_chat(ask, config, model="tiny", vocab_size=vocab_size))
    else:
        findings = asyncio.run(probe_native(ask, config, vocab_size=vocab_size, prompt_ids=bad.PROMPT))
    assert len({finding.check for finding in findings}) == len(findings)
    assert {finding.route for finding in findings} == {"chat" if chat else "native"}
    return {finding.check: finding for finding in findings}


def told(findings):
    return {check: finding.verdict for check, finding in findings.items() if finding.verdict is not OK}


# --- what is well


UNRECORDED = ["evaluation", "K = 0"]
CHECKS = {
    SELECTED: ["candidates", "rows", "numbers", "form", "fields", "temperature", "alignment", *UNRECORDED],
    SUPPORT: [
        "support", "support rows", "support numbers", "fields", "support temperature", "support alignment", "support values",
        *UNRECORDED,
    ],
    OFF: UNRECORDED,
}  # fmt: skip
CHECKS |= {FILTERED: CHECKS[SUPPORT], ONE: CHECKS[SELECTED]}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("config", CHECKS, ids=lambda config: f"{config.mode}-{config.top_logprobs_num}-{config.top_p}")
def test_an_honest_engine_passes_what_the_run_needs_and_is_asked_nothing_else(engine, config, chat):
    findings = probe(engine, config=config, chat=chat)
    assert told(findings) == {}
    assert sorted(findings) == sorted([*CHECKS[config], *(["prompt ids"] if chat and config.top_logprobs_num else [])])
    raise_on_failure(findings.values())


def test_the_run_is_asked_as_training_asks(engine):
    del engine.calls[:]
    probe(engine)
    own, *others = engine.calls
    assert own["top_logprobs_num"] == 32 and own["return_flat_raw_top_logprobs_b64"] and own["return_logprob"]
    assert len(others) == 5 and all(call["sampling_params"]["max_new_tokens"] == 1 for call in others)
    assert [call["sampling_params"]["temperature"] for call in engine.calls] == [1.0, 0.7, 1.0, 1.3, 0.0, 1.0]
    assert all("top_logprobs_num" not in call for call in engine.calls[-2:])


def test_more_candidates_than_the_vocabulary_are_never_asked_for(engine):
    del engine.calls[:]
    findings = probe(engine, config=ScoreCenteringConfig(top_logprobs_num=TRUE_VOCAB + 1))
    assert told(findings) == {"candidates": FAILED} and engine.calls == []
    assert findings["candidates"].remedy.startswith(f"set --rollout-top-logprobs-num to at most {TRUE_VOCAB}")


@pytest.mark.parametrize("chat", [False, True])
def test_an_unknown_vocabulary_is_asked_for_few_and_said_to_be_unknown(engine, chat):
    del engine.calls[:]
    findings = probe(engine, chat=chat, vocab_size=None)
    assert told(findings) == {"vocabulary": UNKNOWN}
    assert "--vocab-size" in findings["vocabulary"].remedy
    asked = [call.get("top_logprobs_num", call.get("top_logprobs", 0)) for call in engine.calls]
    assert max(asked) == 16
    assert told(probe(engine, config=SUPPORT, chat=chat, vocab_size=None)) == {}


# --- what is broken


def when_recording(edit):
    return bad.editing(edit, of=bad.recording)


def drop(*fields):
    return bad.editing(lambda meta: [meta.pop(field) for field in fields])


def draft(meta):
    meta["spec_verify_ct"] = 2


LOST = {"temperature": UNKNOWN}  # nothing could be read
NESTED = {"form": NOTE}  # the edited answer is a nested one
BROKEN = [  # layer, what is told, the check to look at, what came, the remedy
    (bad.drops_flat, {"form": NOTE}, "form", "nested lists", "works, with larger answers .*return_flat_raw_output_top_logprobs"),
    (bad.drops_base64, {"form": NOTE}, "form", "flat lists", "works, with larger answers"),
    (bad.drops_candidates, {"candidates": FAILED, **LOST}, "candidates", "none on 4 tokens", "passes top_logprobs_num"),
    (when_recording(bad.caps_at_20), {"candidates": FAILED, **NESTED}, "candidates", "20 of 32 on every token",
     "passes more than 20, the OpenAI API's limit; or set --rollout-top-logprobs-num 20"),
    (bad.refuses_above_20, {"candidates": FAILED}, "candidates", r"32 refused \(status 400, .*is above 20\), 20 accepted",
     "passes more than 20"),
    (bad.refuses_recording, {"candidates": FAILED, **LOST}, "candidates", r"refused \(status 422, no log-probs here\)",
     "change what it names"),
    (when_recording(bad.merges_by_text), {"candidates": FAILED, **NESTED, **LOST}, "candidates",
     r"\d+ to \d+ of 32, not the same number", "merged by their text .*native route"),
    (when_recording(bad.drops_a_row), {"rows": FAILED, **NESTED, **LOST}, "rows", "3 rows for 4 generated", "cuts or repeats"),
    (when_recording(bad.cuts_tokens_too), {"rows": FAILED, **NESTED, **LOST}, "rows", "3 rows for 4", "cuts or repeats"),
    (when_recording(bad.writes_null), {"numbers": FAILED, **NESTED, **LOST}, "numbers", "row 0: None in place", "changes them"),
    (when_recording(bad.repeats_an_id), {"numbers": FAILED, **NESTED, **LOST}, "numbers", "an id stands twice", "changes them"),
    (when_recording(bad.shifts_everything), {"alignment": FAILED, **NESTED}, "alignment", "of the mass apart", "rows shifted"),
    (bad.asking_for(temperature=1.0), {"temperature": FAILED}, "temperature", "at 0.7, 1, 1.3: the same log-probs",
     "SGLANG_RETURN_ORIGINAL_LOGPROB=0"),
    (bad.at_least_as_hot_as(1.0), {"temperature": FAILED}, "temperature", r"1/T\^0.42 and not with 1/T",
     "change the temperature"),
    (drop("finish_reason"), {"fields": FAILED, **NESTED}, "fields", "finish_reason None", "meta_info.finish_reason"),
    (drop("weight_versions"), NESTED, "fields", "weight_version default", "^$"),
    (drop("weight_versions", "weight_version"), {"fields": FAILED, **NESTED}, "fields", "weight_version None", "^nobody knows"),
    (bad.editing(draft), {"speculative": FAILED, **NESTED}, "speculative", "spec_verify_ct", "without --speculative-algorithm"),
    (bad.refuses_greedy, {"evaluation": FAILED}, "evaluation", r"refused \(status 422, temperature must", "change what it names"),
    (bad.adds_candidates, {"evaluation": NOTE, "K = 0": NOTE}, "K = 0", "output_top_logprobs came unasked", "nobody reads"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "verdicts", "check", "came", "remedy"), BROKEN)
def test_what_breaks_candidates_is_named_with_its_remedy(engine, layer, verdicts, check, came, remedy):
    findings = probe(engine, layer)
    assert told(findings) == verdicts
    assert_says(findings[check], came, remedy)


JUNK = [None, 5, "x", [], [5], [None], {"a": 1}, float("nan"), [[None]]]
B64 = [f"output_top_logprobs_{name}_flat_b64" for name in ("val", "idx")]


@pytest.mark.parametrize(
    ("config", "layer", "fields"),
    [
        (SELECTED, bad.honestly, [bad.TOKENS, "output_top_logprobs_shape", *B64]),
        (SELECTED, bad.drops_flat, [bad.TOKENS, bad.TOP, "weight_versions"]),
        (SUPPORT, bad.honestly, [bad.TOKENS, bad.MASK, bad.MASK_LOG_PROBS, "completion_tokens", "finish_reason"]),
    ],
)
def test_whatever_stands_in_a_field_is_judged(engine, config, layer, fields):
    # absent is as good as null; the rest has no default
    for field, junk in itertools.product(fields, JUNK):
        if junk is None and field in ("completion_tokens", "weight_versions"):
            continue

        def spoil(engine, path, body, field=field, junk=junk):
            answer = layer(engine, path, body)
            return answer | {"meta_info": answer["meta_info"] | {field: junk}} if bad.recording(body) else answer

        assert FAILED in told(probe(engine, spoil, config)).values(), (field, junk)


SUPPORT_LOST = {"support temperature": UNKNOWN}
BROKEN_SUPPORT = [
    (bad.drops_support, {"support": FAILED, **SUPPORT_LOST}, "support", "none on 4 tokens",
     "passes return_sampling_mask and sampling_logprobs_mode"),
    (bad.dropping("sampling_logprobs_mode"), {"support numbers": FAILED, **SUPPORT_LOST}, "support numbers",
     "log-probs of the sampled tokens alone", "passes sampling_logprobs_mode"),
    (bad.asking_for(top_k=24), {"support": FAILED}, "support", "24 ids a token, top_k 16", "top_k is not applied"),
    (bad.editing(bad.adds_a_tie, of=bad.asks_for_support), {"support": NOTE}, "support", "17 to 17 ids .* tie there",
     "leave room for ties"),
    (bad.asking_for(temperature=0.8), {"support temperature": FAILED}, "support temperature", "the same log-probs",
     "SGLANG_RETURN_ORIGINAL_LOGPROB=0"),
    (bad.another_prompt_for_masks, {"support values": FAILED}, "support values", "of the mass apart", "the same weights"),
    (bad.refuses_candidates, {"support values": NOTE}, "support values", "cannot be read: status 400", "does not need them"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "verdicts", "check", "came", "remedy"), BROKEN_SUPPORT)
def test_what_breaks_the_support_is_named_with_its_remedy(engine, layer, verdicts, check, came, remedy):
    findings = probe(engine, layer, SUPPORT)
    assert told(findings) == verdicts
    assert_says(findings[check], came, remedy)


def test_a_run_is_not_troubled_by_what_it_does_not_need(engine):
    assert told(probe(engine, bad.drops_support)) == {}
    assert told(probe(engine, when_recording(bad.keeps_five), ScoreCenteringConfig(top_logprobs_num=5))).keys() == {
        "form", "temperature",
    }  # fmt: skip


BROKEN_CHAT = [
    (bad.dropping("return_meta_info"), SELECTED, {"meta_info": FAILED, **LOST}, "meta_info", "none in the choice",
     "passes return_meta_info"),
    (bad.dropping("return_meta_info"), SUPPORT, {"meta_info": FAILED, **SUPPORT_LOST}, "meta_info", "none in the choice",
     "passes return_meta_info"),
    (bad.dropping("return_prompt_token_ids"), SELECTED, {"prompt ids": FAILED}, "prompt ids", "no prompt_token_ids",
     "passes return_prompt_token_ids"),
    (bad.refuses_above_20, SELECTED, {"candidates": FAILED}, "candidates", "32 refused .* 20 accepted", "more than 20"),
    (when_recording(bad.merges_by_text), SELECTED, {"candidates": FAILED, **NESTED, **LOST}, "candidates", "not the same number",
     "merged by their text"),
    (bad.drops_support, SUPPORT, {"support": FAILED, **SUPPORT_LOST}, "support", "none on 4 tokens", "return_sampling_mask"),
    (bad.refuses_greedy, SELECTED, {"evaluation": FAILED}, "evaluation", "status 422", "change what it names"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "config", "verdicts", "check", "came", "remedy"), BROKEN_CHAT)
def test_what_breaks_chat_is_named_with_its_remedy(engine, layer, config, verdicts, check, came, remedy):
    findings = probe(engine, layer, config, chat=True)
    assert told(findings) == verdicts
    assert_says(findings[check], came, remedy)


def test_engines_with_different_weights_behind_one_route_are_noticed(engine):
    stale = bad.HonestEngine(initializer_range=0.1)
    turn = itertools.count()
    findings = probe(engine, lambda engine, path, body: (engine, stale)[next(turn) // 2 % 2](path, body))
    assert told(findings) == {"temperature": UNKNOWN, "alignment": FAILED}
    for check in ("temperature", "alignment"):
        assert "do all engines behind this route hold the same weights" in findings[check].remedy


DEAD = [
    (None, "no answer within 5 s", "did the server end"),
    (500, "answered 500", "see the log of what answers there"),
    (404, "answered 404", "is this an SGLang server or a router"),
    (200, "the answer is truncated", "see the log of what answers there"),
]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("status", "message", "remedy"), DEAD)
def test_nothing_more_is_asked_of_a_dead_route(engine, status, message, remedy, chat):
    asked = []

    def dies(engine, path, body):
        asked.append(body)
        if len(asked) == 3:
            raise EngineError(message, status)
        return engine(path, body)

    findings = probe(engine, dies, chat=chat)
    assert told(findings) == {"answer": FAILED} and len(asked) == 3
    assert_says(findings["answer"], message, remedy)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_of_another_kind_is_quoted(engine, chat):
    findings = probe(engine, lambda engine, path, body: {"message": "<html>welcome</html>"}, chat=chat)
    assert_says(findings["meta_info"], "none in the answer: .*<html>welcome</html>", "is this an SGLang server or a router")
    assert findings["evaluation"].verdict is FAILED


def test_failures_are_raised_together_with_what_to_do():
    findings = [
        Finding("rows", "native", OK, "fine"),
        Finding("form", "native", NOTE, "nested", "slower"),
        Finding("candidates", "native", FAILED, "20 of 32", "bypass it"),
        Finding("prompt ids", "chat", FAILED, "none", "pass them"),
        Finding("vocabulary", "native", UNKNOWN, "?", "tell it"),
    ]
    with pytest.raises(ValueError, match="native, candidates: 20 of 32; bypass it\n- chat, prompt ids: none; pass them$"):
        raise_on_failure(findings)
    raise_on_failure(finding for finding in findings if finding.verdict is not FAILED)


def assert_says(finding, came, remedy):
    assert re.search(came, finding.came), finding
    assert re.search(remedy, finding.remedy), finding


# --- distributions


def head_at(logits, temperature, *, size=16, noise=0.0, rng=None):
    """The likeliest candidates, from logits that bf16 has rounded where there is noise."""
    if noise:
        logits = (logits + rng.normal(0, noise, logits.size)).astype(np.float32)
        logits = ((logits.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    scaled = logits / temperature
    log_probs = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    best = np.argsort(-log_probs)[:size]
    return dict(zip(best.tolist(), log_probs[best].tolist(), strict=True))


def test_the_exponent_is_one_where_log_probs_are_scaled_and_zero_where_not():
    logits = 3 * np.random.default_rng(0).standard_normal(500)
    hot, cold = head_at(logits, 1.3), head_at(logits, 0.7)
    assert temperature_exponent(hot, cold, 1.3 / 0.7) == pytest.approx((1, 1))
    assert temperature_exponent(hot, hot, 1.3 / 0.7) == pytest.approx((0, 1))
    assert temperature_exponent({1: -0.1}, {1: -0.2, 2: -3.0}, 2) is None
    assert temperature_exponent({1: -1.0, 2: -1.0}, {1: -1.0, 2: -1.0}, 2) is None


@pytest.mark.parametrize("peaked", [False, True])
def test_the_noise_of_bf16_neither_hides_a_dropped_temperature_nor_makes_one_up(peaked):
    rng = np.random.default_rng(1)
    for _ in range(100):
        logits = (
            20
            - 1.2 * np.log(1 + np.arange(20000))
            + 0.3 * rng.standard_normal(20000)
            + (10 * (np.arange(20000) == 7) if peaked else 0)
        )
        hot, cold, again = (head_at(logits, temperature, noise=0.1, rng=rng) for temperature in (1.3, 0.7, 1.3))
        exponent, _ = temperature_exponent(hot, cold, 1.3 / 0.7)
        assert abs(exponent - 1) <= EXPONENT_TOLERANCE
        dropped, fit = temperature_exponent(hot, again, 1.3 / 0.7)
        assert abs(dropped) <= EXPONENT_TOLERANCE and fit >= GOOD_FIT
        assert head_distance(hot, again) <= SAME_HEAD


def test_head_distance_is_the_mass_that_lies_elsewhere():
    even = {1: math.log(0.4), 2: math.log(0.4)}
    assert head_distance(even, even) == 0
    assert head_distance(even, {3: -1.0, 4: -2.0}) == pytest.approx(1)
    assert head_distance(even, {1: math.log(0.3), 2: math.log(0.1)}) == pytest.approx(0.25)
    assert head_distance(even | {3: -9.0, 4: -9.5}, even) == pytest.approx(0)
