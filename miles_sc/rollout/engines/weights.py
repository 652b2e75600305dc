"""Loading a full set of weights into a model in place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


def load_weights(model: nn.Module, state: Mapping[str, np.ndarray | Tensor]) -> None:
    """Copies ``state`` into ``model``, all or nothing, casting to the model's dtypes. ``state`` is only read.

    Every parameter and persistent buffer must be there, under any one of its names where weights are tied; names that
    are tied in the model and both given must hold equal values.

    Raises:
        ValueError: missing or unexpected names, a different shape, values that are not floating point where the model's
            are (and the reverse), or tied names that differ. Nothing has been written then.
    """
    names_of: dict[int, list[str]] = {}
    target_of: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, target in target_of.items():
        names_of.setdefault(id(target), []).append(name)

    unexpected = sorted(set(state) - set(target_of))
    missing = [" or ".join(names) for names in names_of.values() if not any(name in state for name in names)]
    if unexpected or missing:
        raise ValueError(
            f"weights do not fit the model: missing {_listed(missing)}, unexpected {_listed(unexpected)}; send the "
            "full state of the same architecture"
        )
    for name, values in state.items():
        _check_fits(name, values, target_of[name])
    given = [[name for name in names if name in state] for names in names_of.values()]
    for first, *others in given:
        for other in others:
            if not torch.equal(_as_tensor(state[first]), _as_tensor(state[other])):
                raise ValueError(f"{first} and {other} are tied in the model but differ in the new weights; send one")
    with torch.no_grad():
        for name, *_ in given:
            target_of[name].copy_(_as_tensor(state[name]))


def _as_tensor(values: np.ndarray | Tensor) -> Tensor:
    # torch.tensor copies: a read-only view of an object store is never aliased by something writable.
    return values if isinstance(values, Tensor) else torch.tensor(values)


def _check_fits(name: str, values: np.ndarray | Tensor, target: Tensor) -> None:
    if not isinstance(values, (np.ndarray, Tensor)):
        raise ValueError(f"{name} is a {type(values).__name__}; send a numpy array or a torch tensor")
    if tuple(values.shape) != tuple(target.shape):
        raise ValueError(
            f"{name} has shape {list(values.shape)}, the model's is {list(target.shape)}; send the gathered full tensor"
        )
    floating = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    if floating != target.is_floating_point():
        raise ValueError(f"{name} has dtype {values.dtype}, the model's is {target.dtype}; send that kind of number")


def _listed(names: list[str], limit: int = 8) -> str:
    if not names:
        return "none"
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
