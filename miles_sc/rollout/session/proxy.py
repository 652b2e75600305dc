"""What a recorded call asks of the engine, and what its client is answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_sc.config import ScoreCenteringConfig
from miles_sc.rollout.answer_fields import CANDIDATE_FIELDS
from miles_sc.rollout.request import FLAT_FORM, configure_request

# What a session adds to every recorded call; these do not change what is sampled.
_RECORDING = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True}
# What meta_info holds of it beside the candidates, whenever log-probs are asked for.
_LOG_PROBS = ("output_token_logprobs", "input_token_logprobs")
_MOST_UNRECORDED = 20
_NOT_TEXT = ("image", "video", "audio", "file")


@dataclass(frozen=True)
class Wishes:
    """What a client asked to be told, apart from the message.

    Attributes:
        logprobs: of the sampled tokens.
        top_logprobs: alternatives to each of them.
        meta_info, prompt_token_ids: SGLang's own.
        stream: as server-sent events.
        usage: in a chunk of its own at a stream's end.
    """

    logprobs: bool = False
    top_logprobs: int = 0
    meta_info: bool = False
    prompt_token_ids: bool = False
    stream: bool = False
    usage: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Wishes":
        """Reads a chat completion's body.

        Raises:
            ValueError: a field that is not of its type.
        """
        logprobs = _flag(body, "logprobs")
        count = body.get("top_logprobs") or 0
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"top_logprobs = {count!r}: give a number of alternatives")
        options = body.get("stream_options") or {}
        if not isinstance(options, Mapping):
            raise ValueError(f"stream_options = {options!r}: give an object")
        return cls(
            logprobs=logprobs,
            top_logprobs=count if logprobs else 0,
            meta_info=_flag(body, "return_meta_info"),
            prompt_token_ids=_flag(body, "return_prompt_token_ids") or _flag(body, "return_token_ids"),
            stream=_flag(body, "stream"),
            usage=_flag(options, "include_usage"),
        )


def engine_request(config: ScoreCenteringConfig, body: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """The body that the engine is sent, so that the turn can be recorded.

    A stream is asked for in one piece: the engine reports what is recorded in no other way. With K = 0 the sampler's fields are
    the client's own.

    Args:
        config: the run's.
        body: the client's; not touched.

    Raises:
        ValueError: what cannot be recorded, or would sample from another distribution than the run's.
    """
    _check_shape(body)
    if body.get("n") not in (None, 1):
        raise ValueError(f"n = {body['n']!r}: a session's turn has one answer; open a session for each")
    request = configure_request(config, body, openai=True)
    for name in ("stream", "stream_options"):
        request.pop(name, None)
    request.update(_RECORDING)
    if wishes.top_logprobs > _MOST_UNRECORDED and not config.top_logprobs_num:
        # an engine that is asked for more than its vocabulary holds dies
        raise ValueError(f"top_logprobs = {wishes.top_logprobs}: ask for at most {_MOST_UNRECORDED}, as OpenAI allows")
    if config.top_logprobs_num and wishes.top_logprobs:
        request = with_token_texts(config, request, wishes)
    return request


def with_token_texts(config: ScoreCenteringConfig, request: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """A recording request whose answer a client can be shown alternatives of; the flat form carries no texts.

    Raises:
        ValueError: more alternatives than are recorded.
    """
    _check_top_logprobs(config, wishes.top_logprobs)
    return {name: value for name, value in request.items() if name not in FLAT_FORM}


def added_fields(body: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is asked beyond the client's own words, to explain its refusal."""
    return {name: value for name, value in request.items() if name not in body or body[name] != value}


def client_reply(answer: dict[str, Any], wishes: Wishes) -> dict[str, Any]:
    """The engine's answer without what its client did not ask for. The answer is used up.

    Raises:
        ValueError: fewer alternatives than the client asked for.
    """
    choice = answer["choices"][0]
    if not wishes.prompt_token_ids:
        choice.pop("prompt_token_ids")
    meta_info = choice.pop("meta_info")
    if wishes.meta_info:
        hidden = CANDIDATE_FIELDS if wishes.logprobs else CANDIDATE_FIELDS + _LOG_PROBS
        choice["meta_info"] = {name: value for name, value in meta_info.items() if not name.startswith(hidden)}
    if not wishes.logprobs:
        choice["logprobs"] = None
        return answer
    for place, token in enumerate((choice.get("logprobs") or {}).get("content") or ()):
        alternatives = token.get("top_logprobs") or []
        if len(alternatives) < wishes.top_logprobs:
            raise ValueError(
                f"logprobs.content[{place}]: {len(alternatives)} alternatives came and the client asked for "
                f"{wishes.top_logprobs}; were they merged by token text? ask without top_logprobs"
            )
        token["top_logprobs"] = alternatives[: wishes.top_logprobs]
    return answer


def _check_shape(body: Mapping[str, Any]) -> None:
    """As much as this server itself relies on; the engine checks the rest."""
    for name in ("messages", "tools"):
        value = body.get(name)
        if value is None and name == "tools":
            continue
        if not (isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)):
            raise ValueError(f"{name} = {str(value)[:80]}: give a list of objects")
    for tool in body.get("tools") or ():
        if not isinstance(tool.get("function") or {}, Mapping):
            raise ValueError(f"tools: function = {str(tool['function'])[:80]}: give an object")
    for message in body["messages"]:
        if not isinstance(message.get("tool_calls") or [], list):
            raise ValueError(f"tool_calls = {str(message['tool_calls'])[:80]}: give a list")
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and any(word in kind for word in _NOT_TEXT):
                raise ValueError(f"a message part of type {kind}: a Sample holds token ids alone, so only text can be trained on")


def _check_top_logprobs(config: ScoreCenteringConfig, wanted: int) -> None:
    if config.mode == "support":
        raise ValueError(
            f"top_logprobs = {wanted} while sampling is filtered: the engine reports the support then and no alternatives; "
            "leave top_logprobs out"
        )
    if wanted > config.top_logprobs_num:
        raise ValueError(
            f"top_logprobs = {wanted}: the run records --rollout-top-logprobs-num {config.top_logprobs_num}; ask for at most that"
        )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: give true or false")
    return bool(value)
