"""What a model's directory says of its weights, so that a state which would load only in part is refused.

SGLang itself passes over names that it does not know and keeps the old values of those that do not come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face model directory.

    Attributes:
        path: the directory.
        vocab_size: None where its configuration names none.
        tied: the output layer is the embedding.
        shapes: of every tensor by name; empty where there are no safetensors to tell.
    """

    path: Path
    vocab_size: int | None
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads the configuration and the headers of the weight files.

        Raises:
            ValueError: no model directory.
        """
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no config.json: give the directory of a Hugging Face model")
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        return cls(path, text.get("vocab_size"), bool(text.get("tie_word_embeddings")), shapes)

    def matching(self, state: Mapping[str, Any]) -> dict[str, np.ndarray | Tensor]:
        """``state`` without an output layer that repeats the embedding.

        Raises:
            ValueError: no weights, missing or unexpected names, another shape, something that is no array, or a tied output layer
                that differs from the embedding.
        """
        if not state:
            raise ValueError("no weights at all: send every tensor of the model")
        for name, value in state.items():
            if not isinstance(value, np.ndarray | Tensor):
                raise ValueError(f"{name} is a {type(value).__name__}: send a numpy array or a torch tensor")
        state, shapes = dict(state), dict(self.shapes)
        if self.tied:
            shapes.pop(_HEAD, None)
        if self.tied and _EMBEDDING in state and (head := state.pop(_HEAD, None)) is not None:
            if not torch.equal(torch.as_tensor(head), torch.as_tensor(state[_EMBEDDING])):
                raise ValueError(f"{_HEAD} and {_EMBEDDING} are tied in {self.path} and differ in the new weights: send one")
        if not shapes:
            return state
        if shapes.keys() != state.keys():
            raise ValueError(
                f"the weights do not fit {self.path}: missing {_some(shapes.keys() - state.keys())}, unexpected "
                f"{_some(state.keys() - shapes.keys())}; send every tensor under its name in the checkpoint"
            )
        for name, value in state.items():
            if tuple(value.shape) != shapes[name]:
                raise ValueError(
                    f"{name} has shape {list(value.shape)} and {list(shapes[name])} in {self.path}: send whole tensors"
                )
        return state


def _some(names: set[str], most: int = 8) -> str:
    listed = ", ".join(sorted(names)[:most]) or "none"
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")
