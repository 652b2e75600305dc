"""Every route and form of a real server against the Hugging Face model.

``MILES_SC_LIVE_ARTIFACTS`` names a folder in which each request and its raw answer are kept.
"""

import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout import Sample, append_candidates, configure_request
from tests.live import reference

TOLERANCE = 1e-4
TOKENS = 8
FORMS = {
    "nested": {"return_flat_raw_output_top_logprobs": False, "return_flat_raw_top_logprobs_b64": False},
    "flat": {"return_flat_raw_top_logprobs_b64": False},
    "base64": {},
}


@pytest.fixture(scope="module")
def model(server):
    return reference.load(server.model)


@pytest.fixture
def ask(server, request):
    """``ask(path, body) -> answer`` of the real server."""

    def ask(path, body):
        response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
        if folder := os.environ.get("MILES_SC_LIVE_ARTIFACTS"):
            name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
            record = {"path": path, "request": body, "status": response.status_code, "response": response.json()}
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(json.dumps(record))
        assert response.status_code == 200, response.text
        return response.json()

    return ask


def native(ask, config, form, vocab_size):
    body = {"input_ids": [40, 50, 60], "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    answer = ask("/generate", configure_request(config, body) | FORMS[form])
    return recorded(config, body["input_ids"], answer["meta_info"], vocab_size)


def chat(ask, config, form, vocab_size):
    body = {"model": "any", "messages": [{"role": "user", "content": "3 + 4 ="}], "max_tokens": TOKENS, "ignore_eos": True}
    configured = configure_request(config, body, openai=True) | FORMS[form] | {"return_prompt_token_ids": True}
    (choice,) = ask("/v1/chat/completions", configured)["choices"]
    return recorded(config, choice["prompt_token_ids"], choice["meta_info"], vocab_size)


def recorded(config, prompt, meta_info, vocab_size):
    sample = Sample(tokens=list(prompt))
    append_candidates(sample, meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=vocab_size)
    return sample


@pytest.mark.parametrize("route", [native, chat])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_candidates_are_the_models_at_the_temperature(ask, model, route, form, temperature):
    config = ScoreCenteringConfig(top_logprobs_num=24, temperature=temperature)
    sample = route(ask, config, form, model.config.vocab_size)
    assert sample.response_length == TOKENS and reference.largest_error(sample, model, temperature) < TOLERANCE
    likeliest = np.sort(reference.log_probs(model, sample.tokens, temperature)[-TOKENS - 1 : -1], axis=1)[:, :-25:-1]
    np.testing.assert_allclose(sample.rollout_topk_log_probs, likeliest, atol=TOLERANCE)


@pytest.mark.parametrize("route", [native, chat])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.7, 1.0, 12), (1.0, 0.8, 24), (1.3, 0.95, 8)])
def test_a_filtered_support_is_what_top_k_and_top_p_leave_over(ask, model, route, temperature, top_p, top_k):
    config = ScoreCenteringConfig(top_logprobs_num=24, temperature=temperature, top_p=top_p, top_k=top_k)
    sample = route(ask, config, "base64", model.config.vocab_size)
    assert sample.response_length == TOKENS and reference.largest_error(sample, model, temperature) < TOLERANCE
    whole = np.exp(reference.log_probs(model, sample.tokens, temperature)[-TOKENS - 1 : -1])
    for row, distribution in enumerate(whole):
        # the fewest of the likeliest that hold top_p of the whole distribution, and of those at most top_k
        order = np.argsort(-distribution)
        kept = order[: min(top_k, int(np.searchsorted(np.cumsum(distribution[order]), top_p)) + 1)]
        assert set(sample.rollout_topk_token_ids[row]) - {-1} == set(kept.tolist())


@pytest.mark.parametrize("route", [native, chat])
def test_a_completion_without_tokens_has_no_rows(ask, model, route):
    """Unfiltered only: the server answers 500 to a filtered call that may generate nothing."""

    def ask_for_nothing(path, body):
        at = body if path.startswith("/v1") else body["sampling_params"]
        at["max_tokens" if path.startswith("/v1") else "max_new_tokens"] = 0
        return ask(path, body)

    sample = route(ask_for_nothing, ScoreCenteringConfig(top_logprobs_num=24), "base64", model.config.vocab_size)
    assert sample.response_length == 0 and sample.rollout_topk_token_ids.shape == (0, 24)
