"""Whether log-probs are those of the distribution that is sampled from; and calls that record nothing."""

from collections.abc import Sequence
from dataclasses import replace

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.probe.asker import FEW_CANDIDATES, NOT_SGLANG, Asker, Reply, quoted
from miles_sc.rollout.probe.distribution import (
    EXPONENT_TOLERANCE,
    GOOD_FIT,
    SAME_HEAD,
    Head,
    first_head,
    head_distance,
    temperature_exponent,
)
from miles_sc.rollout.probe.finding import Finding, Verdict

_SCALES = (0.7, 1.0, 1.3)
# what ties with the last of top_k candidates is in the support too, on some sampling backends
_ROOM_FOR_TIES = 256
_ONE_MODEL = "do all engines behind this route hold the same weights, and does nothing on the way change the prompt?"


async def check_distribution(asker: Asker, run: Head | None) -> list[Finding]:
    """Compares reports of one prompt's next token: at three temperatures, alone and as the first of several.

    Args:
        run: the head that the run's own call reported for it; None where that could not be read.
    """
    filtered = asker.config.mode == "support"
    prefix = "support " if filtered else ""
    temperatures = [round(asker.config.temperature * scale, 6) for scale in _SCALES]
    try:
        heads = [await _head(asker, _few(asker, temperature=temperature)) for temperature in temperatures]
    except ValueError as error:
        came = "not reached: no answer can be read" if run is None else f"a smaller call cannot be read: {quoted(error)}"
        return [asker.found(f"{prefix}temperature", Verdict.UNKNOWN, came)]
    findings = [_temperature(asker, f"{prefix}temperature", temperatures, heads)]
    if run is not None:
        findings.append(_alignment(asker, f"{prefix}alignment", run, heads[1]))
    if filtered:
        findings.append(await _support_values(asker, f"{prefix}values", heads[1]))
    return findings


def _temperature(asker: Asker, check: str, temperatures: Sequence[float], heads: Sequence[Head]) -> Finding:
    at = "at " + ", ".join(f"{temperature:g}" for temperature in temperatures)
    followed = temperature_exponent(heads[-1], heads[0], temperatures[-1] / temperatures[0])
    if followed is None:
        return asker.found(
            check,
            Verdict.UNKNOWN,
            f"{at}: too few candidates in common that differ",
            f"{_ONE_MODEL} If so, it is flat after this prompt",
        )
    exponent, fit = followed
    came = f"{at}: log-probs go with 1/T^{exponent:.2f}"
    if abs(exponent - 1) <= EXPONENT_TOLERANCE:
        return asker.found(check, Verdict.OK, came)
    if fit < GOOD_FIT:
        return asker.found(check, Verdict.UNKNOWN, f"{at}: the candidates' order is too noisy", _ONE_MODEL)
    if abs(exponent) <= EXPONENT_TOLERANCE:
        remedy = (
            "log-probs lack the temperature: start the engine with SGLANG_RETURN_ORIGINAL_LOGPROB=0; if it was, something on the "
            "way overwrites the temperature"
        )
        return asker.found(check, Verdict.FAILED, f"{at}: the same log-probs", remedy)
    return asker.found(
        check,
        Verdict.FAILED,
        f"{came} and not with 1/T",
        f"does something on the way change the temperature? If not: {_ONE_MODEL}",
    )


def _alignment(asker: Asker, check: str, run: Head, alone: Head) -> Finding:
    distance = head_distance(run, alone)
    came = f"the first of several rows and a row alone: {distance:.2g} of the mass apart"
    if distance <= SAME_HEAD:
        return asker.found(check, Verdict.OK, came)
    return asker.found(check, Verdict.FAILED, came, f"are rows shifted on the way? If not: {_ONE_MODEL}")


async def _support_values(asker: Asker, check: str, support: Head) -> Finding:
    few = _few(asker, temperature=asker.config.temperature)
    unfiltered = replace(few, top_k=-1, top_logprobs_num=few.top_k)
    try:
        selected = await _head(asker, unfiltered)
    except ValueError as error:
        came = f"candidates to compare with cannot be read: {quoted(error)}"
        return asker.found(check, Verdict.NOTE, came, "a filtered run does not need them")
    distance = head_distance(support, selected)
    came = f"the support and renormalised candidates: {distance:.2g} of the mass apart"
    if distance <= SAME_HEAD:
        return asker.found(check, Verdict.OK, came)
    return asker.found(check, Verdict.FAILED, came, f"this is not the support of the model's distribution: {_ONE_MODEL}")


async def _head(asker: Asker, config: ScoreCenteringConfig) -> Head:
    return first_head(asker.read(await asker.record(config, 1), config).candidates)


def _few(asker: Asker, *, temperature: float) -> ScoreCenteringConfig:
    """The run's kind of sampling, with few candidates."""
    few = min(FEW_CANDIDATES, asker.vocab_size or FEW_CANDIDATES)
    if asker.config.mode == "selected":
        return replace(asker.config, top_logprobs_num=few, temperature=temperature)
    return replace(asker.config, top_logprobs_num=_ROOM_FOR_TIES, temperature=temperature, top_p=1.0, top_k=few)


async def check_unrecorded(asker: Asker) -> list[Finding]:
    """An evaluation call, and one of a run without recording."""
    findings = []
    for check, call in (("evaluation", asker.evaluate), ("K = 0", asker.sample_unrecorded)):
        try:
            reply = await call(1)
        except ValueError as error:
            remedy = "the message is the server's: change what it names"
            findings.append(asker.found(check, Verdict.FAILED, f"refused ({quoted(error)})", remedy))
        else:
            findings.append(_unrecorded(asker, check, reply))
    return findings


def _unrecorded(asker: Asker, check: str, reply: Reply) -> Finding:
    if not reply.choice.get("message" if asker.route.openai else "output_ids"):
        return asker.found(check, Verdict.FAILED, f"no tokens: {quoted(reply.answer)}", NOT_SGLANG)
    unasked = [name for name in reply.meta_info or () if name.startswith(("output_top_", "output_token_sampling_"))]
    if unasked:
        remedy = "works, but something on the way asks for candidates that nobody reads"
        return asker.found(check, Verdict.NOTE, f"{unasked[0]} came unasked", remedy)
    return asker.found(check, Verdict.OK, "tokens came, and nothing besides")
