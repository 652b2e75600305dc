"""What an address says of itself: engine or router, its version, its model."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_sc.rollout.engines.sglang.client import EngineError
from miles_sc.rollout.model_directory import model_vocabulary

Get = Callable[[str], Awaitable[Any]]
"""Path -> JSON; raises EngineError."""


@dataclass(frozen=True)
class AboutServer:
    """What could be learnt; None where nothing was said.

    Attributes:
        version: SGLang's, of an engine.
        model: the name that chat calls ask for.
        model_paths: where an engine has the model and its tokenizer from; after new weights by disk the first is often gone.
        speculative: its algorithm, "" for none.
        engines: addresses behind a router; None for an engine.
    """

    version: str | None
    model: str | None
    model_paths: tuple[str, ...]
    speculative: str | None
    engines: tuple[str, ...] | None

    @property
    def vocabulary(self) -> int | None:
        """The model's, where a directory that the server names is on this machine."""
        # a relative path would be looked for in another directory than the server's
        found = (model_vocabulary(Path(path)) for path in self.model_paths if Path(path).is_absolute())
        return next((size for size in found if size is not None), None)


async def ask_server(get: Get) -> AboutServer:
    """
    Raises:
        EngineError: nothing answers there.
    """
    models = await _first(get, "/v1/models")
    served = next(iter(models.get("data") or ()), {})
    about_model = await _first(get, "/model_info", "/get_model_info")
    about_server = await _first(get, "/server_info", "/get_server_info")
    speculative = about_server.get("speculative_algorithm")
    return AboutServer(
        version=about_server.get("version"),
        model=served.get("id") or about_model.get("served_model_name"),
        model_paths=tuple(path for name in ("model_path", "tokenizer_path") if isinstance(path := about_model.get(name), str)),
        speculative=(speculative or "") if "speculative_algorithm" in about_server else None,
        engines=_engines(await _first(get, "/workers", "/list_workers")),
    )


async def _first(get: Get, *paths: str) -> Mapping[str, Any]:
    """The first of these that answers with an object; {} where none does."""
    for path in paths:
        try:
            answer = await get(path)
        except EngineError as error:
            if error.status is None:
                raise
            continue
        if isinstance(answer, Mapping):
            return answer
    return {}


def _engines(answer: Mapping[str, Any]) -> tuple[str, ...] | None:
    # sglang-router lists workers; older ones, and Miles' own, list urls
    if isinstance(workers := answer.get("workers"), list):
        # prefill and decode workers answer nothing alone
        urls = [worker["url"] for worker in workers if worker.get("url") and worker.get("worker_type", "regular") == "regular"]
    elif not isinstance(urls := answer.get("urls"), list):
        return None
    # a data-parallel rank of an engine is written http://host:port@rank
    return tuple(dict.fromkeys(re.sub(r"@\d+$", "", url) for url in urls))
