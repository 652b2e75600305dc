"""How an engine is asked for tokens and given new weights.

Importing this package loads no model library: `embedded` (transformers) and its neighbours are imported by whoever uses
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Engine"]


class Engine(Protocol):
    """What the rollout side needs of an engine, whether a model in this process or a server behind HTTP."""

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers bodies of SGLang's native ``/generate``, in request order, in that server's wire."""
        ...

    def update_weights(self, state: Mapping[str, Any], version: str) -> None:
        """Replaces every weight by ``state`` (name -> array); later tokens carry ``version``."""
        ...
