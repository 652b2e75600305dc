"""One recorded call: asked of the engine, read, told to the client."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.engines.sglang.client import EngineClient, EngineError
from miles_sc.rollout.session.continuation import Conversation, Prompt, PromptContinuation
from miles_sc.rollout.session.errors import SessionError, answered_with
from miles_sc.rollout.session.proxy import Wishes, added_fields, client_reply, engine_request
from miles_sc.rollout.session.record import RecordedTurn, read_turn
from miles_sc.rollout.session.stream import event_stream

CHAT = "/v1/chat/completions"
# What a run's sampler writes out; everything else that is added makes the turn recordable.
_SAMPLER = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
# Refusals that are about the engine's credentials or addresses, not about what the client said.
_OUR_FAULT = frozenset({401, 403, 404, 405})


@dataclass(frozen=True)
class Exchange:
    """What came of a call.

    Attributes:
        turn: to be kept.
        reply: to be told, of ``media_type``.
        prompt: where the prompt's tokens came from.
        said: digest of the conversation after the answer; None where prompts are not continued.
    """

    turn: RecordedTurn
    reply: bytes
    media_type: str
    prompt: Prompt
    said: bytes | None


class Recorder:
    """Recorded calls to one engine.

    Args:
        config: the run's.
        vocab_size: the engine's.
        continuation: makes prompts of recorded tokens; None leaves every prompt to the engine's chat template.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ScoreCenteringConfig,
        vocab_size: int | None,
        continuation: PromptContinuation | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._vocab_size = vocab_size
        self._continuation = continuation
        # a tokenizer is used by one thread at a time
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="miles-sc-prompts")

    async def exchange(self, asked: dict[str, Any], recorded: Mapping[bytes, RecordedTurn], arrival: int) -> Exchange:
        """One chat completion.

        Args:
            asked: the client's body.
            recorded: the session's turns by the digest of what had been said.
            arrival: the call's number in its session.

        Raises:
            SessionError: 400 and other 4xx, the request is refused; 502, 503 and 504, the engine's faults, an answer that cannot
                be trained on among them.
        """
        with answered_with(400, "refused"):
            wishes = Wishes.of(asked)
            to_engine = engine_request(self._config, asked, wishes)
        conversation, prompt = await self._prompt(asked, recorded)
        if prompt.token_ids is not None:
            to_engine["input_ids"] = prompt.token_ids

        def read(answer: dict[str, Any]) -> Exchange:
            turn = read_turn(answer, self._config, vocab_size=self._vocab_size, arrival=arrival)
            prompt.check_seen(turn.prompt_ids)
            said = conversation and conversation.answered(answer["choices"][0]["message"])
            reply = client_reply(answer, wishes)
            if wishes.stream:
                return Exchange(turn, event_stream(reply, usage=wishes.usage), "text/event-stream", prompt, said)
            return Exchange(turn, orjson.dumps(reply), "application/json", prompt, said)

        try:
            return await self._engine.ask(CHAT, to_engine, read)
        except EngineError as error:
            raise _told_by_engine(error, added_fields(asked, to_engine)) from error
        except ValueError as error:  # what `read` found
            raise SessionError(str(error), 502, "not_recorded") from error

    async def close(self) -> None:
        self._rendering.shutdown(cancel_futures=True)
        await self._engine.close()

    async def _prompt(
        self, asked: Mapping[str, Any], recorded: Mapping[bytes, RecordedTurn]
    ) -> tuple[Conversation | None, Prompt]:
        if self._continuation is None:
            return None, Prompt(None, "rendered")
        if asked.get("input_ids") is not None:
            return None, Prompt(None, "the client's own")

        def continued() -> tuple[Conversation, Prompt]:
            conversation = Conversation.of(asked)
            return conversation, self._continuation.prompt(conversation, recorded)

        return await asyncio.get_running_loop().run_in_executor(self._rendering, continued)


def _told_by_engine(error: EngineError, added: Mapping[str, Any]) -> SessionError:
    """The engine's refusal of what its client said stays the client's; of what this server added, it is a fault behind it."""
    status = error.status
    if status == 504 or isinstance(error.__cause__, TimeoutError):
        return SessionError(str(error), 504, "engine_timeout")
    if status in (429, 503):
        return SessionError(str(error), 503, "engine_busy")
    if status is None or not 400 <= status < 500 or status in _OUR_FAULT:
        return SessionError(str(error), 502, "engine_failed")
    # not in full: a prompt's token ids may be among them
    fields = ", ".join(
        f"{name} = {value!r}" if name != "input_ids" else f"{len(value)} input_ids" for name, value in added.items()
    )
    told = f"{error}; the session server had added {fields}"
    if any(name in str(error) for name in added if name not in _SAMPLER):
        return SessionError(f"{told}; ask the engine directly, or update the router before it", 502, "not_recorded")
    return SessionError(told, status, "engine_refused")
