"""How the probe asks: with the requests of training, on the native route or on chat."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer import GeneratedTokens, read_generated_tokens
from miles_sc.rollout.engines.sglang.client import EngineError
from miles_sc.rollout.probe.finding import Finding, Verdict
from miles_sc.rollout.request import configure_request

Ask = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Path and body -> answer; raises EngineError."""

# Enough to tell distributions apart; below every known cap and every language model's vocabulary.
FEW_CANDIDATES = 16
NOT_SGLANG = "is this an SGLang server or a router, and its URL without a path?"
_QUOTED_CHARACTERS = 200
_SERVERS_OWN_WORDS = re.compile(r'"message":\s*("(?:[^"\\]|\\.)*")')


class RouteDead(Exception):
    """Nothing on this route answers; asking on is of no use."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(quoted(error))
        if error.status in (404, 405):
            self.remedy = NOT_SGLANG
        elif error.status is None:
            self.remedy = "did the server end (SGLang does, asked for more candidates than its vocabulary has), or is it slow?"
        else:
            self.remedy = "see the log of what answers there"


class Route(Protocol):
    """Where to ask, in which words, and where in the answer to look."""

    name: str
    path: str
    openai: bool

    def request(self, sampling: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        """A body that asks for ``tokens`` tokens and records no candidates."""
        ...

    def choice(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of an answer that holds ``meta_info``; {} where there is none."""
        ...


@dataclass(frozen=True)
class NativeRoute:
    """SGLang's ``/generate``."""

    prompt_ids: Sequence[int]
    name = "native"
    path = "/generate"
    openai = False

    def request(self, sampling: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        # the rollout asks for the sampled token's log-prob whether or not candidates are recorded
        return {
            "input_ids": list(self.prompt_ids),
            "sampling_params": {**sampling, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
        }

    def choice(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        return answer


@dataclass(frozen=True)
class ChatRoute:
    """Chat completions, as the session server asks them."""

    model: str
    name = "chat"
    path = "/v1/chat/completions"
    openai = True

    def request(self, sampling: Mapping[str, Any], tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "return_prompt_token_ids": True,
            **sampling,
        }

    def choice(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        return first if isinstance(first, Mapping) else {}


@dataclass(frozen=True)
class Reply:
    """One answer, and the part of it that holds ``meta_info``."""

    answer: Mapping[str, Any]
    choice: Mapping[str, Any]

    @property
    def meta_info(self) -> Mapping[str, Any] | None:
        meta_info = self.choice.get("meta_info")
        return meta_info if isinstance(meta_info, Mapping) else None


@dataclass(frozen=True)
class Asker:
    """One route of one run."""

    route: Route
    ask: Ask
    config: ScoreCenteringConfig
    vocab_size: int | None

    async def record(self, config: ScoreCenteringConfig, tokens: int) -> Reply:
        """A training call.

        Raises:
            EngineError: it was refused.
            RouteDead: neither this nor any other call is answered.
        """
        return await self._call(configure_request(config, self.route.request({}, tokens), openai=self.route.openai))

    async def evaluate(self, tokens: int) -> Reply:
        """A greedy call, of which nothing is recorded; raises as `record` does."""
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        request = self.route.request(greedy, tokens)
        return await self._call(configure_request(self.config, request, openai=self.route.openai, evaluation=True))

    async def sample_unrecorded(self, tokens: int) -> Reply:
        """A training call of a run with K = 0; raises as `record` does."""
        config = self.config
        sampler = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "min_p": 0.0}
        off = replace(config, top_logprobs_num=0)
        return await self._call(configure_request(off, self.route.request(sampler, tokens), openai=self.route.openai))

    def read(self, reply: Reply, config: ScoreCenteringConfig) -> GeneratedTokens:
        """As the rollout reads it.

        Raises:
            ValueError: training would refuse this answer.
        """
        if reply.meta_info is None:
            raise ValueError("the answer has no meta_info")
        generated = read_generated_tokens(
            reply.meta_info, k=config.top_logprobs_num, mode=config.mode, vocab_size=self.vocab_size
        )
        if not len(generated):
            raise ValueError("no token was generated")
        return generated

    def found(self, check: str, verdict: Verdict, came: str, remedy: str = "") -> Finding:
        return Finding(check, self.route.name, verdict, came, remedy)

    async def _call(self, body: Mapping[str, Any]) -> Reply:
        try:
            answer = await self.ask(self.route.path, body)
        except EngineError as error:
            refused = error.status is not None and 400 <= error.status < 500 and error.status not in (404, 405)
            if refused:
                raise
            raise RouteDead(error) from error
        return Reply(answer, self.route.choice(answer))


def quoted(value: object) -> str:
    """Its text on one line of bearable length; of a refusal what the server itself said."""
    text = str(value)
    if isinstance(value, EngineError) and (said := _SERVERS_OWN_WORDS.search(text)):
        text = f"status {value.status}, {json.loads(said[1])}"
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}..."
