"""Responses from an engine: requests out, samples filled in; one turn or several, whole or in parts."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer import check_likeliest, meta_info_of, read_generated_tokens
from miles_sc.rollout.engines import Engine
from miles_sc.rollout.request import configure_request
from miles_sc.rollout.response import append_generated_tokens
from miles_sc.rollout.sample import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationSettings:
    """What all calls of a run have in common.

    Attributes:
        config: sampler and candidates.
        max_response_len: most tokens of a response, observations included.
        vocab_size: the producer's.
        decode: token ids -> text.
        stop_token_ids: what a response ends with by itself; an abort that comes at the same moment does not reopen it.
    """

    config: ScoreCenteringConfig
    max_response_len: int
    vocab_size: int
    decode: Callable[[Sequence[int]], str]
    stop_token_ids: Sequence[int] = ()


class Environment(Protocol):
    """What answers the policy between its turns: tools, a game, a verifier."""

    async def observe(self, sample: Sample, text: str) -> Sequence[int] | None:
        """Token ids to append after a turn that generated ``text`` (a tool's answer and the frame of the next turn); None ends
        the conversation."""
        ...


async def generate_response(engine: Engine, sample: Sample, settings: GenerationSettings, *, sampling_seed: int) -> None:
    """Samples one response and records the sampler's distribution.

    A sample that an abort cut short is continued where it stopped: its earlier tokens keep the candidates, and the weight
    versions, of the weights that sampled them.

    Args:
        sample: holds its prompt; extended in place.
        sampling_seed: so that a resumed run draws what the uninterrupted one would have drawn, from an engine that reads it (the
            embedded one, and SGLang under ``--enable-deterministic-inference``).

    Raises:
        ValueError: an answer that cannot be trained on, with the sample's index; the sample is as it was before the call.
    """
    await _generate_turn(engine, sample, settings, sampling_seed)


async def generate_conversation(
    engine: Engine,
    sample: Sample,
    settings: GenerationSettings,
    environment: Environment,
    *,
    max_turns: int,
    sampling_seed: int,
) -> None:
    """The same with an environment that answers after each turn; its observations are untrained gap rows.

    Ends when the environment does, after ``max_turns``, or ``truncated`` when the next observation would leave no room in
    ``max_response_len``. An aborted conversation is continued by another call with the same arguments.
    """
    while await _generate_turn(engine, sample, settings, sampling_seed) and sample.turns < max_turns:
        observation = await environment.observe(sample, settings.decode(sample.newest_turn()))
        if observation is None:
            return
        if len(observation) == 0:
            raise ValueError(f"sample {sample.index}: an observation without tokens; answer None to end the conversation")
        if sample.response_length + len(observation) >= settings.max_response_len:
            sample.truncated = True
            return
        sample.append_observation(observation)


async def greedy_responses(engine: Engine, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
    """Evaluation: the likeliest continuation of each prompt, without recording anything."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": max_new_tokens}
    requests = [{"input_ids": list(prompt), "sampling_params": sampling} for prompt in prompts]
    return await all_or_none(engine.generate(request, lambda answer: answer["output_ids"]) for request in requests)


async def all_or_none(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run together, in their order; the first failure cancels the others and is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(call) for call in calls)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _generate_turn(engine: Engine, sample: Sample, settings: GenerationSettings, sampling_seed: int) -> bool:
    """One call; whether the policy ended its turn by itself, so that an environment may answer."""
    if sample.response_length >= settings.max_response_len:
        sample.truncated, sample.aborted = True, False
        return False
    # a random stream of its own for each turn
    request = _request(sample, settings, sampling_seed + (sample.turns << 42))
    finish_reason = await engine.generate(request, lambda answer: _record(sample, settings, answer))
    sample.response = settings.decode(sample.tokens[len(sample.tokens) - sample.response_length :])
    sample.aborted, sample.truncated = finish_reason == "abort", finish_reason == "length"
    sample.turns += not sample.aborted
    return finish_reason == "stop"


def _record(sample: Sample, settings: GenerationSettings, answer: Mapping[str, Any]) -> str:
    """Appends what one call generated; how it finished. Large arrays are read here, off the event loop."""
    config = settings.config
    before = sample.weight_versions or [""] * sample.response_length
    try:
        meta_info = meta_info_of(answer)
        generated = read_generated_tokens(meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=settings.vocab_size)
        check_likeliest(generated)
        if generated.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason = {meta_info.get('finish_reason')!r}: only stop, length and abort are understood")
        if (asked := meta_info.get("prompt_tokens", len(sample.tokens))) != len(sample.tokens):
            raise ValueError(
                f"prompt_tokens = {asked!r} and {len(sample.tokens)} were sent: the answer belongs to another prompt, or a "
                "server cut this one (--allow-auto-truncate)"
            )
        append_generated_tokens(sample, generated)
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from error
    sample.weight_versions = [*before, *generated.weight_versions]
    ended = generated.finish_reason == "abort" and len(generated) and generated.token_ids[-1] in settings.stop_token_ids
    return "stop" if ended else generated.finish_reason


def _request(sample: Sample, settings: GenerationSettings, sampling_seed: int) -> dict[str, Any]:
    config = settings.config
    sampling = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0,
        "max_new_tokens": settings.max_response_len - sample.response_length,
        "sampling_seed": sampling_seed,
    }
    return configure_request(config, {"input_ids": sample.tokens, "sampling_params": sampling, "return_logprob": True})
