"""The run's own call: whether everything that training records arrives."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer import GeneratedTokens
from miles_sc.rollout.engines.sglang.client import EngineError
from miles_sc.rollout.probe.asker import FEW_CANDIDATES, NOT_SGLANG, Asker, Reply, quoted
from miles_sc.rollout.probe.diagnosis import BYPASS, CHECKS, OPENAI_LIMIT, diagnose
from miles_sc.rollout.probe.distribution import TIE, Head, first_head
from miles_sc.rollout.probe.finding import Finding, Verdict

_TOKENS = 4
_BEST_FORM = "flat base64"
_FORMS = {
    "output_top_logprobs_idx_flat_b64": _BEST_FORM,
    "output_top_logprobs_idx_flat": "flat lists",
    "output_top_logprobs": "nested lists",
}


async def check_recording(asker: Asker) -> tuple[list[Finding], Head | None]:
    """Asks as training asks.

    Returns:
        Findings, and the first token's head; None where training could not read it.
    """
    config, findings = asker.config, []
    if config.mode == "selected" and asker.vocab_size is None and config.top_logprobs_num > FEW_CANDIDATES:
        findings.append(
            asker.found(
                "vocabulary", Verdict.UNKNOWN,
                f"of unknown size, so {FEW_CANDIDATES} candidates were asked for and not {config.top_logprobs_num}",
                "give --vocab-size or --hf-checkpoint: SGLang dies, asked for more candidates than its vocabulary holds",
            )
        )  # fmt: skip
        config = replace(config, top_logprobs_num=FEW_CANDIDATES)
    try:
        reply = await asker.record(config, _TOKENS)
    except EngineError as refusal:
        refused, head = await _refused(asker, config, refusal)
        return [*findings, *refused], head
    judged, head = _judge(asker, config, reply)
    return [*findings, *judged], head


async def _refused(asker: Asker, config: ScoreCenteringConfig, refusal: EngineError) -> tuple[list[Finding], Head | None]:
    amount, k = CHECKS[config.mode][0], config.top_logprobs_num
    if config.mode == "selected" and k > OPENAI_LIMIT:
        fewer = replace(config, top_logprobs_num=OPENAI_LIMIT)
        try:
            reply = await asker.record(fewer, _TOKENS)
        except EngineError:
            pass  # so it was not for their number
        else:
            capped = asker.found(
                amount, Verdict.FAILED, f"{k} refused ({quoted(refusal)}), {OPENAI_LIMIT} accepted",
                f"{BYPASS} more than {OPENAI_LIMIT}, the OpenAI API's limit; or set --rollout-top-logprobs-num {OPENAI_LIMIT}",
            )  # fmt: skip
            judged, head = _judge(asker, fewer, reply)
            return [capped, *(finding for finding in judged if finding.check != amount)], head
    remedy = "the message is the server's: change what it names, or update what answers"
    return [asker.found(amount, Verdict.FAILED, f"refused ({quoted(refusal)})", remedy)], None


def _judge(asker: Asker, config: ScoreCenteringConfig, reply: Reply) -> tuple[list[Finding], Head | None]:
    if reply.meta_info is None:
        chat = asker.route.openai and reply.choice
        came = "none in the choice" if chat else f"none in the answer: {quoted(reply.answer)}"
        dropped = asker.found("meta_info", Verdict.FAILED, came, f"{BYPASS} return_meta_info" if chat else NOT_SGLANG)
        return [dropped, *_prompt_ids(asker, reply)], None
    try:
        generated = asker.read(reply, config)
    except ValueError as error:
        diagnosis, head = diagnose(reply.meta_info, config, error), None
        recorded = [asker.found(diagnosis.check, Verdict.FAILED, diagnosis.came, diagnosis.remedy)]
    else:
        recorded, head = _recorded(asker, config, generated), first_head(generated.candidates)
    others = [*_form(asker, reply.meta_info), *_fields(asker, reply.meta_info), *_prompt_ids(asker, reply)]
    return [*recorded, *others], head


def _recorded(asker: Asker, config: ScoreCenteringConfig, generated: GeneratedTokens) -> list[Finding]:
    amount, rows, numbers = CHECKS[config.mode]
    tokens, mass = len(generated), np.exp(generated.candidates.log_probs.astype(np.float64)).sum(axis=1)
    if config.mode == "selected":
        first = asker.found(amount, Verdict.OK, f"{config.top_logprobs_num} of {config.top_logprobs_num} on every token")
    else:
        first = _support_lengths(asker, config, generated)
    return [
        first,
        asker.found(rows, Verdict.OK, f"{tokens} for {tokens} tokens"),
        asker.found(numbers, Verdict.OK, f"ids distinct, mass {mass.min():.4f} to {mass.max():.4f}"),
    ]


def _support_lengths(asker: Asker, config: ScoreCenteringConfig, generated: GeneratedTokens) -> Finding:
    """Rows hold up to ``top_k`` ids, and what ties with the last of these."""
    check, lengths = CHECKS["support"][0], generated.support.lengths
    came = f"{lengths.min()} to {lengths.max()} ids a token, top_k {config.top_k}"
    ordered = -np.sort(-generated.candidates.log_probs, axis=1)
    last, beyond = ordered[:, config.top_k - 1 : config.top_k], ordered[:, config.top_k :]
    if (beyond < last - TIE)[np.isfinite(beyond)].any():
        return asker.found(check, Verdict.FAILED, came, f"top_k is not applied as it was asked for: {BYPASS} sampling_params")
    if np.isfinite(beyond).any():
        return asker.found(
            check, Verdict.NOTE, f"{came}: candidates tie there",
            "leave room for ties: set --rollout-top-logprobs-num well above --rollout-top-k, as a longer row is an error",
        )  # fmt: skip
    return asker.found(check, Verdict.OK, came)


def _form(asker: Asker, meta_info: Mapping[str, Any]) -> list[Finding]:
    form = next((form for field, form in _FORMS.items() if meta_info.get(field)), None)
    if form is None:
        return []
    if form == _BEST_FORM:
        return [asker.found("form", Verdict.OK, form)]
    remedy = "works, with larger answers that read more slowly; SGLang 0.5.23 knows return_flat_raw_output_top_logprobs"
    return [asker.found("form", Verdict.NOTE, f"{form}, and {_BEST_FORM} was asked for", remedy)]


def _fields(asker: Asker, meta_info: Mapping[str, Any]) -> list[Finding]:
    """What else the rollout reads of an answer."""
    reason, version = meta_info.get("finish_reason"), meta_info.get("weight_version") or meta_info.get("weight_versions")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    came = f"finish_reason {quoted(kind)}, weight_version {quoted(version)}"
    if kind not in ("stop", "length", "abort"):
        remedy = f"{BYPASS} meta_info.finish_reason: a response that was cut is not told from a finished one"
        findings = [asker.found("fields", Verdict.FAILED, came, remedy)]
    elif version is None:
        # the trainer tells a restarted server by it, on the route that it uses
        native = asker.route.name == "native"
        remedy = f"{'' if native else 'works, but '}nobody knows which weights sampled a token; {BYPASS} meta_info.weight_version"
        findings = [asker.found("fields", Verdict.FAILED if native else Verdict.NOTE, came, remedy)]
    else:
        findings = [asker.found("fields", Verdict.OK, came)]
    drafted = [name for name in meta_info if name.startswith("spec_")]
    if drafted:
        remedy = "start the engine without --speculative-algorithm: it reports other log-probs than it samples from"
        findings.append(asker.found("speculative", Verdict.FAILED, f"tokens were drafted: {drafted[0]} came", remedy))
    return findings


def _prompt_ids(asker: Asker, reply: Reply) -> list[Finding]:
    if not asker.route.openai:
        return []
    ids = reply.choice.get("prompt_token_ids")
    if isinstance(ids, list) and ids:
        return [asker.found("prompt ids", Verdict.OK, f"{len(ids)} ids")]
    remedy = f"{BYPASS} return_prompt_token_ids: the session server records a prompt by its ids"
    return [asker.found("prompt ids", Verdict.FAILED, "no prompt_token_ids in the choice", remedy)]
