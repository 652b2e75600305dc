"""A sampler in the trainer's own process, and weights that are made to differ before any engine gets them."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from miles_sc.rollout.engines import Engine
from miles_sc.rollout.engines.embedded import EmbeddedEngine
from miles_sc.rollout.engines.in_process import InProcessEngine
from miles_sc.rollout.engines.mismatch import Mismatch
from miles_sc.rollout.engines.weights import load_weights
from miles_sc.trainer.prompts import PromptCodec

T = TypeVar("T")


def embedded_engine(
    args: argparse.Namespace, model: PreTrainedModel, codec: PromptCodec, mismatch: Mismatch | None = None
) -> InProcessEngine:
    """A sampler in this process; it owns ``model`` from here on."""
    return InProcessEngine(
        EmbeddedEngine(
            model,
            stop_token_ids=codec.stop_token_ids,
            pad_token_id=codec.pad_token_id,
            seed=args.rollout_seed,
            mismatch=mismatch,
        )
    )


class MismatchedEngine:
    """An engine whose weights are made to differ from the trainer's before it gets them."""

    def __init__(self, engine: Engine, model: PreTrainedModel, mismatch: Mismatch) -> None:
        self._engine, self._model, self._mismatch = engine, model, mismatch
        mismatch.remember(model)

    async def generate(self, request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
        return await self._engine.generate(request, read)

    async def update_weights(self, state: Mapping[str, Any], version: str) -> None:
        load_weights(self._model, state)
        self._mismatch.apply(self._model)
        changed = self._model.state_dict()
        await self._engine.update_weights({name: changed[name] for name in state}, version)

    async def abort(self) -> None:
        await self._engine.abort()

    async def close(self) -> None:
        await self._engine.close()
