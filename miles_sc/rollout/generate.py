"""Responses from an engine: requests out, samples filled in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines import Engine
from miles_sc.rollout.request import configure_request
from miles_sc.rollout.response import append_candidates, append_sampled_tokens
from miles_sc.rollout.sample import Sample


def generate_responses(
    engine: Engine,
    samples: Sequence[Sample],
    config: ScoreCenteringConfig,
    *,
    max_new_tokens: int,
    vocab_size: int,
    decode: Callable[[Sequence[int]], str],
    sampling_seeds: Sequence[int],
) -> None:
    """Samples one response per sample and records the sampler's distribution.

    Args:
        samples: hold their prompts; filled in place.
        config: sampler and candidates of the run.
        sampling_seeds: one per sample, so that a resumed run draws what the uninterrupted one would have drawn.

    Raises:
        ValueError: an answer that cannot be trained on, with the sample's index.
    """
    requests = [
        configure_request(config, _request(sample, config, max_new_tokens, seed))
        for sample, seed in zip(samples, sampling_seeds, strict=True)
    ]
    for sample, answer in zip(samples, engine.generate(requests), strict=True):
        meta_info = answer["meta_info"]
        before = sample.weight_versions or [""] * sample.response_length
        try:
            versions = _weight_versions(meta_info)
            if config.top_logprobs_num:
                append_candidates(sample, meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=vocab_size)
            else:
                append_sampled_tokens(sample, meta_info, vocab_size=vocab_size)
        except ValueError as error:
            raise ValueError(f"sample {sample.index}: {error}") from error
        sample.weight_versions = [*before, *versions]
        sample.truncated = meta_info["finish_reason"]["type"] == "length"
        sample.response = decode(sample.tokens[len(sample.tokens) - sample.response_length :])


def greedy_responses(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Evaluation: the likeliest continuation of each prompt, without recording anything."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": max_new_tokens}
    answers = engine.generate([{"input_ids": list(prompt), "sampling_params": sampling} for prompt in prompts])
    return [decode(answer["output_ids"]) for answer in answers]


def _weight_versions(meta_info: Mapping[str, Any]) -> list[str]:
    """The weights that sampled each of the call's tokens; they may have changed on the way."""
    tokens, spans = len(meta_info.get("output_token_logprobs") or ()), meta_info.get("weight_versions")
    if spans is None:
        return [meta_info.get("weight_version") or ""] * tokens
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != tokens:
        raise ValueError(f"weight_versions = {spans} for {tokens} generated tokens: every token was sampled by one version")
    return versions


def _request(sample: Sample, config: ScoreCenteringConfig, max_new_tokens: int, seed: int) -> dict[str, Any]:
    sampling = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0,
        "max_new_tokens": max_new_tokens,
        "sampling_seed": seed,
    }
    return {"input_ids": sample.tokens, "sampling_params": sampling, "return_logprob": True}
