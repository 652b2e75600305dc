"""Prompts made of recorded tokens: a history goes on with the tokens that were sampled, never with their text tokenised anew."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import numpy as np
import orjson

from miles_sc.rollout.session.record import RecordedTurn

_MARK = "\u2063the-answer-stands-here\u2063"
# What else decides how a template renders messages.
_RENDERING = ("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
# What a client may leave out of an answer that it sends back, or add to it.
_OPTIONAL = ("reasoning_content", "refusal", "annotations", "audio", "function_call")


class Tokenizer(Protocol):
    """As much of a Hugging Face tokenizer as is used."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class _CannotContinue(Exception):
    """Why the engine must render a prompt."""


@dataclass(frozen=True)
class Prompt:
    """Token ids to ask the engine with; None leaves the prompt to its chat template.

    Attributes:
        origin: ``new``, ``continued``, ``rendered: ...`` with the reason, in few enough words to be counted.
    """

    token_ids: list[int] | None
    origin: str

    def check_seen(self, seen: np.ndarray) -> None:
        """The engine took the prompt that it was sent.

        Raises:
            ValueError: it took another.
        """
        if self.token_ids is not None and not np.array_equal(seen, self.token_ids):
            raise ValueError(
                f"the engine was sent a prompt of {len(self.token_ids)} tokens as input_ids and saw {seen.size} others: it, or a "
                "router before it, does not know input_ids on chat (SGLang 0.5.23 does); leave --tokenizer out"
            )


@dataclass(frozen=True)
class Conversation:
    """A request's messages, and digests of what they say up to each of them."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Conversation":
        options = {name: body[name] for name in _RENDERING if body.get(name) is not None}
        digests = [_digest(b"", options)]
        for message in body["messages"]:
            digests.append(_digest(digests[-1], _said(message)))
        return cls(body["messages"], options, tuple(digests))

    def answered(self, message: Mapping[str, Any]) -> bytes:
        """The digest when this is the next message."""
        return _digest(self.digests[-1], _said(message))


class PromptContinuation:
    """Continues recorded turns by the tokens that a chat template adds to them.

    The earlier tokens stay as the engine saw and sampled them, thinking included, even where the template would leave something
    of an answer out. Messages that render otherwise than before, or that were edited, are not continued.

    Args:
        tokenizer: the engine's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, conversation: Conversation, recorded: Mapping[bytes, RecordedTurn]) -> Prompt:
        """What the engine is to be asked with.

        Args:
            recorded: turns by the digest of what had been said when each had answered.
        """
        if not any(message.get("role") == "assistant" for message in conversation.messages):
            return Prompt(None, "new")
        try:
            return Prompt(self._continued(conversation, *_last_recorded(conversation, recorded)), "continued")
        except _CannotContinue as reason:
            return Prompt(None, f"rendered: {reason}")

    def _continued(self, conversation: Conversation, said: int, turn: RecordedTurn) -> list[int]:
        stop = "" if turn.stop_token is None else self._tokenizer.decode([turn.stop_token], skip_special_tokens=False)
        ending, after = self._behind_answer(conversation, said, stop)
        ids = turn.token_ids
        if ending.startswith(stop):
            ending = ending[len(stop) :]
        else:  # the template ends an answer in its own way
            ids = ids[:-1]
        return [*ids.tolist(), *self._tokenizer.encode(ending + after, add_special_tokens=False)]

    def _behind_answer(self, conversation: Conversation, said: int, stop: str) -> tuple[str, str]:
        """How the template ends the last of the ``said`` messages, an answer, and what it writes behind it."""
        before, answer, later = conversation.messages[: said - 1], conversation.messages[said - 1], conversation.messages[said:]
        answer = {**answer, "content": _MARK}
        whole = self._render([*before, answer, *later], conversation, add_generation_prompt=True)
        if whole.count(_MARK) != 1:
            raise _CannotContinue("the chat template does not show an answer's words")
        if not whole.startswith(self._render(before, conversation)):
            raise _CannotContinue("the chat template renders earlier messages otherwise now")
        alone, behind = self._behind_words([*before, answer], conversation), whole.partition(_MARK)[2]
        ending = self._ending_of_calls(alone, conversation, stop) if answer.get("tool_calls") else alone
        if not (behind.startswith(alone) and alone.endswith(ending)):
            raise _CannotContinue("the chat template does not show where an answer ends")
        return ending, behind[len(alone) :]

    def _ending_of_calls(self, alone: str, conversation: Conversation, stop: str) -> str:
        """What ends an answer whose calls stand between its words and its end: its stop, or else what ends one without calls."""
        _, found, rest = alone.rpartition(stop) if stop else ("", "", "")
        if found and not rest.strip():
            return found + rest
        return self._behind_words([{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}], conversation)

    def _behind_words(self, messages: Sequence[Mapping[str, Any]], conversation: Conversation) -> str:
        return self._render(messages, conversation).partition(_MARK)[2]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        options = conversation.options
        try:
            return self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=options.get("tools") if options.get("tool_choice") != "none" else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options.get("chat_template_kwargs", {}),
            )
        except (TypeError, ValueError, jinja2.TemplateError) as error:
            raise _CannotContinue(f"the chat template fails on it ({type(error).__name__})") from error


def _last_recorded(conversation: Conversation, recorded: Mapping[bytes, RecordedTurn]) -> tuple[int, RecordedTurn]:
    """The last recorded answer that stands in a conversation, and how many messages it ends."""
    messages = conversation.messages
    if messages[-1].get("role") == "assistant":
        raise _CannotContinue("its last message is an answer, to be gone on with")
    if any(isinstance(message.get("content"), list) for message in messages):
        raise _CannotContinue("a message comes in parts, which engines join in ways of their own")
    for said in range(len(messages) - 1, 0, -1):
        if (turn := recorded.get(conversation.digests[said])) is not None:
            return said, turn
    raise _CannotContinue("no recorded answer stands in it as it was given")


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it counts: an answer in whatever form its client sends it back."""
    if message.get("role") != "assistant":
        return {name: value for name, value in message.items() if value is not None}
    calls = [
        [call.get("id"), call.get("function")] if isinstance(call, Mapping) else call for call in message.get("tool_calls") or ()
    ]
    said = {"role": "assistant", "content": message.get("content") or "", "tool_calls": calls}
    others = {name: value for name, value in message.items() if name not in (*said, *_OPTIONAL) and value is not None}
    return said | others


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """As engines hand messages to templates: no null content, arguments as objects."""
    told = {name: value for name, value in message.items() if value is not None} | {"content": message.get("content") or ""}
    if told.get("tool_calls"):
        told["tool_calls"] = [_with_arguments(call) for call in told["tool_calls"]]
    return told


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("arguments"), str)):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
