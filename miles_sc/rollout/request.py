"""What is asked of an SGLang engine so that its answer carries the sampler's distribution (CONTRACT 5)."""

import copy
from collections.abc import Mapping
from typing import Any

from miles_sc.config import ScoreCenteringConfig

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_NEUTRAL_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
# Asks for candidates as flat arrays; a server that does not know these answers nested, and both forms are read.
FLAT_FORM = ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64")
# A native request holds these beside its sampling parameters.
_BESIDE_NATIVE_SAMPLING = ("custom_logit_processor", "watermark", "lora_path", "session_params", "input_embeds")


def configure_request(
    config: ScoreCenteringConfig, request: Mapping[str, Any], *, openai: bool = False, evaluation: bool = False
) -> dict[str, Any]:
    """A request that records candidates, from one that does not.

    On training calls the configured count and mode override the client's, and missing or null sampling values are written
    out, since a model's generation config could supply others. With recording off (K = 0) and on evaluation calls the
    request comes back as it was.

    Args:
        config: the run's.
        request: body of native ``/generate``, or of chat completions with ``openai``; not touched.

    Returns:
        A new request.

    Raises:
        ValueError: a field of this call that would sample from another distribution than the run's.
    """
    # the prompt may be long, and its ids need no deep copy, which visits each
    configured = {name: list(value) if name == "input_ids" and value else copy.deepcopy(value) for name, value in request.items()}
    if config.top_logprobs_num == 0 or evaluation:
        return configured
    if openai:
        sampling = configured
    else:
        given = configured.get("sampling_params") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"sampling_params = {given!r} in a training request: give one mapping; a batch is a request each")
        sampling = configured["sampling_params"] = dict(given)
    _write_out_sampler(config, sampling)
    if openai and sampling.get("repetition_penalty") is None:
        # some models' generation config brings one (1.05), and chat alone reads that
        sampling["repetition_penalty"] = 1.0
    beside = {} if openai else {name: configured[name] for name in _BESIDE_NATIVE_SAMPLING if configured.get(name)}
    _refuse_other_distributions(config, sampling | beside)
    for name in ("top_logprobs", "top_logprobs_num", "return_sampling_mask", "sampling_logprobs_mode"):
        configured.pop(name, None)
    if openai:
        configured.update(logprobs=True, return_meta_info=True)
    else:
        configured["return_logprob"] = True
    if config.mode == "support":
        configured.update(return_sampling_mask=True, sampling_logprobs_mode="support")
    else:
        configured["top_logprobs" if openai else "top_logprobs_num"] = config.top_logprobs_num
        configured.update(dict.fromkeys(FLAT_FORM, True))
    return configured


def _write_out_sampler(config: ScoreCenteringConfig, sampling: dict[str, Any]) -> None:
    for name, value in {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": 0.0}.items():
        if sampling.get(name) is None:
            sampling[name] = value


def _refuse_other_distributions(config: ScoreCenteringConfig, sampling: Mapping[str, Any]) -> None:
    def refuse(name: str, why: str) -> None:
        raise ValueError(f"{name} = {sampling[name]!r} in a training request: {why}")

    for name in ("temperature", "top_p", "top_k", "min_p"):
        if isinstance(sampling[name], bool) or not isinstance(sampling[name], int | float):
            refuse(name, "give a number, or leave it out")
    if sampling["temperature"] != config.temperature:
        refuse("temperature", f"the trainer scores at --rollout-temperature {config.temperature}; leave it out of the request")
    if sampling["min_p"] != 0:
        refuse("min_p", "its filter is not reported; leave it out or set 0")
    if not 0 < sampling["top_p"] <= 1:
        refuse("top_p", "give a number in (0, 1], or leave it out")
    filtered = sampling["top_p"] < 1 or sampling["top_k"] > 0
    if config.mode == "selected" and filtered:
        refuse(
            "top_p" if sampling["top_p"] < 1 else "top_k",
            "filtered sampling in an unfiltered run; set --rollout-top-k and --rollout-top-p for the whole run instead",
        )
    if config.mode == "support" and not sampling["top_k"] > 0:
        refuse("top_k", f"unfiltered sampling in a filtered run; leave it out, the run's is {config.top_k}")
    if sampling["top_k"] > config.top_logprobs_num:
        refuse("top_k", f"only --rollout-top-logprobs-num {config.top_logprobs_num} candidates are recorded; lower it")
    for name in (*_GRAMMARS, "custom_logit_processor", "logit_bias"):
        if sampling.get(name):
            refuse(name, "it changes the distribution after the log-probs are taken; leave it out")
    if sampling.get("watermark"):
        refuse("watermark", "it draws from another distribution than it reports; leave it out")
    if sampling.get("lora_path"):
        refuse("lora_path", "an adapter's tokens are not the trained policy's; leave it out")
    for name in ("session_params", "input_embeds"):
        if sampling.get(name):
            refuse(name, "the trainer would not see the prompt that the engine saw; send token ids or messages")
    for name in ("min_new_tokens", "min_tokens"):
        if sampling.get(name):
            refuse(name, "it forbids the stop tokens for a while, which the trainer does not; leave it out")
    for name, neutral in _NEUTRAL_PENALTIES.items():
        if sampling.get(name) not in (None, neutral):
            refuse(name, f"penalties change the distribution with every token; leave it out or set {neutral}")
    response_format = sampling.get("response_format")
    if response_format and not (isinstance(response_format, Mapping) and response_format.get("type") == "text"):
        refuse("response_format", "it switches a grammar on; leave it out or ask for text")
    if sampling.get("tool_choice") not in (None, "auto", "none"):
        refuse("tool_choice", "a forced tool switches a grammar on; use auto or none")
    tools = [tool for tool in sampling.get("tools") or () if isinstance(tool, Mapping)]  # what is no tool the server refuses
    strict = any((tool.get("function") or {}).get("strict") or tool.get("strict") for tool in tools)
    if strict and sampling.get("tool_choice") != "none":
        refuse("tools", "a strict tool switches a grammar on; leave strict out or set tool_choice to none")
