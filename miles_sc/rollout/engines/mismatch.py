"""How the sampler's weights are made to differ from the trainer's: fake quantisation or a fixed perturbation.

The difference is one of real arithmetic: weights are quantised and dequantised into the model's dtype, so that logits,
draws and reported log-probs all come from the changed weights.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

FORMS = "none, int8, int4, noise:<sigma> (such as noise:0.01)"
INT4_GROUP_SIZE = 32


class Mismatch(ABC):
    """A change of weights, applied in place after each load of fresh ones."""

    @property
    def remembered(self) -> bool:
        """Whether it has all it needs of the initial weights."""
        return True

    def remember(self, model: nn.Module) -> None:  # noqa: B027  most need nothing
        """Takes what it needs of the run's initial weights; once, before the first `apply`."""

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Changes freshly loaded weights in place. Not idempotent."""


class NoMismatch(Mismatch):
    """Sampler and trainer hold the same weights, bit for bit."""

    def apply(self, model: nn.Module) -> None:
        pass


class FakeQuantization(Mismatch):
    """Symmetric round-to-nearest quantisation of the weight of every Linear, dequantised into the model's dtype.

    One scale an output channel, or one a group of ``group_size`` inputs where the inputs divide into groups. Embeddings
    stay exact, since weight-only kernels look rows up in full precision; so does an output head that is tied to them.
    An output head of its own is a Linear like any other.
    """

    def __init__(self, bits: int, group_size: int | None = None):
        self.bits = bits
        self.group_size = group_size

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        weights = linear_weights(model)
        if not weights:
            raise ValueError(
                f"--rollout-mismatch int{self.bits}: {type(model).__name__} has no Linear layer with a weight of its "
                "own; use noise:<sigma> or none"
            )
        for weight in weights:
            weight.copy_(fake_quantize(weight, self.bits, self.group_size))


class WeightNoise(Mismatch):
    """``w + sigma * N(0, 1) * w_init``, the perturbation fixed for the run, on every parameter (a tied one once).

    The perturbation depends on ``seed``, the parameter's name and the initial weights only, so a resumed run that
    remembers the same initial weights samples from the same changed model.
    """

    def __init__(self, sigma: float, seed: int):
        self.sigma = sigma
        self.seed = seed
        self._deltas: dict[str, Tensor] = {}

    @property
    def remembered(self) -> bool:
        return bool(self._deltas)

    @torch.no_grad()
    def remember(self, model: nn.Module) -> None:
        if self._deltas:
            raise ValueError("--rollout-mismatch noise: initial weights are known already; remember them once a run")
        for name, parameter in model.named_parameters():
            normal = torch.from_numpy(_normal(self.seed, name, tuple(parameter.shape))).to(parameter.device)
            self._deltas[name] = normal.mul_(parameter.float()).mul_(self.sigma)

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        if parameters.keys() != self._deltas.keys():
            differing = sorted(parameters.keys() ^ self._deltas.keys())
            raise ValueError(
                f"--rollout-mismatch noise: {len(differing)} parameters are not in both this model and the initial "
                f"weights ({', '.join(differing[:4])}); call remember with the same architecture first"
            )
        for name, parameter in parameters.items():
            parameter.copy_(parameter.float() + self._deltas[name])


def parse_mismatch(text: str, *, seed: int = 0) -> Mismatch:
    """Reads the value of ``--rollout-mismatch``: ``none``, ``int8``, ``int4`` or ``noise:<sigma>``.

    Args:
        text: the flag's value.
        seed: of the noise; the same for every engine of a run.

    Raises:
        ValueError: another form, or a sigma that is not finite and positive.
    """
    name, separator, argument = text.partition(":")
    constructor = _CONSTRUCTORS.get(name)
    if constructor is None or bool(separator) != (name == "noise"):
        raise ValueError(f"--rollout-mismatch {text!r} is not one of {FORMS}")
    return constructor(argument, seed)


def linear_weights(model: nn.Module) -> list[Tensor]:
    """The weights of Linear layers, each once, without those that an embedding shares."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return [weight for key, weight in weights.items() if key not in embedded]


def fake_quantize(weight: Tensor, bits: int, group_size: int | None = None) -> Tensor:
    """Quantises ``[out, in]`` to integers in +-(2^(bits-1) - 1) and back, a scale a row or a group of inputs.

    A row whose length ``group_size`` does not divide is one group. Float32 ``[out, in]``.
    """
    rows, columns = weight.shape
    width = group_size if group_size is not None and columns % group_size == 0 else columns
    groups = weight.float().reshape(rows, -1, width)
    levels = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True) / levels
    # A group of zeros stays zero, whatever it is divided by.
    scale = torch.where(scale > 0, scale, 1.0)
    return (groups / scale).round_().clamp_(-levels, levels).mul_(scale).reshape(rows, columns)


def _noise(argument: str, seed: int) -> Mismatch:
    try:
        sigma = float(argument)
    except ValueError:
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"--rollout-mismatch 'noise:{argument}': sigma must be finite and positive; allowed: {FORMS}")
    return WeightNoise(sigma, seed)


_CONSTRUCTORS: dict[str, Callable[[str, int], Mismatch]] = {
    "none": lambda argument, seed: NoMismatch(),
    "int8": lambda argument, seed: FakeQuantization(bits=8),
    "int4": lambda argument, seed: FakeQuantization(bits=4, group_size=INT4_GROUP_SIZE),
    "noise": _noise,
}


def _normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    digest = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    stream = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(map(int, digest))))
    return stream.standard_normal(shape, dtype=np.float32)
