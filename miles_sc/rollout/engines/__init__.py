"""How an engine is asked for tokens and given new weights.

Importing this package loads no model library and no HTTP client: `embedded` (transformers), `sglang` and their neighbours are
imported by whoever uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

__all__ = ["Engine"]

T = TypeVar("T")


class Engine(Protocol):
    """What the rollout side needs of an engine, whether a model in this process or a server behind HTTP."""

    async def generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        """Answers one body of SGLang's native ``/generate``; many may be under way at once.

        Args:
            read: makes of the answer (``output_ids``, ``meta_info``, ...) what is returned. It runs where a large answer does
                not hold up the event loop, which may be another thread; what it raises is raised here.
        """
        ...

    async def update_weights(self, state: Mapping[str, Any], version: str) -> None:
        """Replaces every weight by ``state`` (name -> array); tokens sampled later carry ``version``."""
        ...

    async def abort(self) -> None:
        """Ends what is under way; each call is answered with the tokens it has and the finish reason ``abort``, and has returned
        when this does."""
        ...

    async def close(self) -> None:
        """Gives back what the engine holds: processes, connections, threads."""
        ...
