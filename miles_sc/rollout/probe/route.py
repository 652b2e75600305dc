"""Asks one route everything that a run needs of it."""

from collections.abc import Sequence

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.probe.asker import Ask, Asker, ChatRoute, NativeRoute, RouteDead
from miles_sc.rollout.probe.finding import Finding, Verdict
from miles_sc.rollout.probe.recording import check_recording
from miles_sc.rollout.probe.sampling import check_distribution, check_unrecorded


async def probe_native(
    ask: Ask, config: ScoreCenteringConfig, *, vocab_size: int | None, prompt_ids: Sequence[int]
) -> list[Finding]:
    """Asks ``/generate`` for what a run with this config would: some seven calls of 1 to 4 tokens.

    Args:
        ask: path and body -> answer; the way that training's own calls go.
        config: decides what is needed: candidates, the sampling support, or (K = 0) neither.
        vocab_size: the engine's; None asks for few candidates alone and says so.
        prompt_ids: token ids to continue.
    """
    return await _probe(Asker(NativeRoute(prompt_ids), ask, config, vocab_size))


async def probe_chat(ask: Ask, config: ScoreCenteringConfig, *, model: str, vocab_size: int | None) -> list[Finding]:
    """The same of ``/v1/chat/completions``, with what the session server needs besides.

    Args:
        model: name to ask for.
    """
    return await _probe(Asker(ChatRoute(model), ask, config, vocab_size))


async def _probe(asker: Asker) -> list[Finding]:
    config, findings = asker.config, []
    if config.mode == "selected" and asker.vocab_size is not None and config.top_logprobs_num > asker.vocab_size:
        return [
            asker.found(
                "candidates", Verdict.FAILED, f"{config.top_logprobs_num} not asked for: the vocabulary holds {asker.vocab_size}",
                f"set --rollout-top-logprobs-num to at most {asker.vocab_size}; SGLang dies on more",
            )
        ]  # fmt: skip
    try:
        if config.top_logprobs_num:
            recorded, head = await check_recording(asker)
            findings += recorded
            findings += await check_distribution(asker, head)
        findings += await check_unrecorded(asker)
    except RouteDead as dead:
        findings.append(asker.found("answer", Verdict.FAILED, str(dead), dead.remedy))
    return findings
