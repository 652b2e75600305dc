"""Weights between Hugging Face names and Megatron's tensor-parallel shards, in both directions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from miles_sc.backends.megatron_model import head_size, padded_vocabulary
from miles_sc.parallel.groups import rank_in, size_of


@dataclass(frozen=True)
class _Shape:
    """What the layouts of fused weights depend on."""

    groups: int
    head_size: int
    vocab_size: int
    tensor_size: int


@dataclass(frozen=True)
class _Kind:
    """How one Megatron weight is made of Hugging Face weights.

    Attributes:
        join: their list -> Megatron's whole tensor, the ranks' shards side by side along ``dim``.
        split: the inverse.
        dim: sharded along it; None where every rank holds all.
    """

    join: Callable[[Sequence[Tensor], _Shape], Tensor]
    split: Callable[[Tensor, _Shape], list[Tensor]]
    dim: int | None = None


def _only(tensors: Sequence[Tensor], shape: _Shape) -> Tensor:
    return tensors[0]


def _as_it_is(whole: Tensor, shape: _Shape) -> list[Tensor]:
    return [whole]


def _join_qkv(tensors: Sequence[Tensor], shape: _Shape) -> Tensor:
    """Megatron keeps a query group together: its queries, its key, its value."""
    by_group = [tensor.unflatten(0, (shape.groups, -1)) for tensor in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _split_qkv(whole: Tensor, shape: _Shape) -> list[Tensor]:
    by_group = whole.unflatten(0, (shape.groups, -1))
    queries = by_group.shape[1] - 2 * shape.head_size
    return [part.flatten(0, 1) for part in by_group.split([queries, shape.head_size, shape.head_size], dim=1)]


def _join_gated(tensors: Sequence[Tensor], shape: _Shape) -> Tensor:
    """A rank's shard holds its part of the gate, then its part of the up projection."""
    by_rank = [tensor.unflatten(0, (shape.tensor_size, -1)) for tensor in tensors]
    return torch.cat(by_rank, dim=1).flatten(0, 1)


def _split_gated(whole: Tensor, shape: _Shape) -> list[Tensor]:
    return [part.flatten(0, 1) for part in whole.unflatten(0, (shape.tensor_size, -1)).chunk(2, dim=1)]


def _join_vocabulary(tensors: Sequence[Tensor], shape: _Shape) -> Tensor:
    rows = padded_vocabulary(shape.vocab_size, shape.tensor_size)
    return torch.nn.functional.pad(tensors[0], (0, 0, 0, rows - shape.vocab_size))


def _split_vocabulary(whole: Tensor, shape: _Shape) -> list[Tensor]:
    return [whole[: shape.vocab_size]]


_REPLICATED = _Kind(_only, _as_it_is)
_COLUMNS = _Kind(_only, _as_it_is, dim=1)
_QKV = _Kind(_join_qkv, _split_qkv, dim=0)
_GATED = _Kind(_join_gated, _split_gated, dim=0)
_VOCABULARY = _Kind(_join_vocabulary, _split_vocabulary, dim=0)

_OUTSIDE = {
    "embedding.word_embeddings.weight": (_VOCABULARY, ["model.embed_tokens.weight"]),
    "decoder.final_layernorm.weight": (_REPLICATED, ["model.norm.weight"]),
    "output_layer.weight": (_VOCABULARY, ["lm_head.weight"]),
}
_ATTENTION = [f"self_attn.{name}_proj" for name in "qkv"]
_LAYER = {
    "input_layernorm.weight": (_REPLICATED, ["input_layernorm.weight"]),
    "self_attention.linear_qkv.weight": (_QKV, [f"{name}.weight" for name in _ATTENTION]),
    "self_attention.linear_qkv.bias": (_QKV, [f"{name}.bias" for name in _ATTENTION]),
    "self_attention.q_layernorm.weight": (_REPLICATED, ["self_attn.q_norm.weight"]),
    "self_attention.k_layernorm.weight": (_REPLICATED, ["self_attn.k_norm.weight"]),
    "self_attention.linear_proj.weight": (_COLUMNS, ["self_attn.o_proj.weight"]),
    "pre_mlp_layernorm.weight": (_REPLICATED, ["post_attention_layernorm.weight"]),
    "mlp.linear_fc1.weight": (_GATED, ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
    "mlp.linear_fc2.weight": (_COLUMNS, ["mlp.down_proj.weight"]),
}
# Transformer Engine keeps a norm with the projection that follows it
_LAYER["self_attention.linear_qkv.layer_norm_weight"] = _LAYER["input_layernorm.weight"]
_LAYER["mlp.linear_fc1.layer_norm_weight"] = _LAYER["pre_mlp_layernorm.weight"]


class WeightMap:
    """Translates the parameters of one model."""

    def __init__(self, model: PretrainedConfig, tensor_group: dist.ProcessGroup | None) -> None:
        self._group = tensor_group
        self._shape = _Shape(model.num_key_value_heads, head_size(model), model.vocab_size, size_of(tensor_group))

    def shard(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """This rank's shard of the Megatron parameter ``name``, from whole Hugging Face weights."""
        kind, sources = _rule(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            raise ValueError(f"the checkpoint has no {missing[0]}, which Megatron's {name} is made of: is it complete?")
        whole = kind.join([weights[source] for source in sources], self._shape)
        return whole if kind.dim is None else whole.chunk(self._shape.tensor_size, dim=kind.dim)[rank_in(self._group)]

    def gather(self, name: str, shard: Tensor) -> dict[str, Tensor]:
        """Whole Hugging Face weights of a Megatron parameter. One gather over the tensor-parallel group if it is sharded."""
        kind, targets = _rule(name)
        if kind.dim is not None and self._shape.tensor_size > 1:
            shards = [torch.empty_like(shard) for _ in range(self._shape.tensor_size)]
            dist.all_gather(shards, shard.contiguous(), group=self._group)
            shard = torch.cat(shards, dim=kind.dim)
        return dict(zip(targets, kind.split(shard, self._shape), strict=True))


def hugging_face_names(name: str) -> list[str]:
    """The Hugging Face weights that a Megatron parameter is made of."""
    return _rule(name)[1]


def _rule(name: str) -> tuple[_Kind, list[str]]:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    prefix, _, rest = name.partition("decoder.layers.")
    number, _, inner = rest.partition(".")
    if prefix or inner not in _LAYER:
        raise ValueError(f"Megatron's parameter {name} has no known Hugging Face counterpart; use --train-backend fsdp")
    kind, names = _LAYER[inner]
    return kind, [f"model.layers.{number}.{source}" for source in names]
