"""What the Megatron backend builds, what it refuses, and weights through it and back."""

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from miles_sc.backends.megatron_model import padded_vocabulary, transformer_config
from miles_sc.backends.megatron_on_cpu import megatron_on_cpu
from miles_sc.backends.megatron_weights import WeightMap, hugging_face_names
from miles_sc.parallel.context import ContextLayout

SHAPE = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def settings(model, *, tensor_size=1):
    return transformer_config(model, tensor_size=tensor_size, layout=ContextLayout(), bf16=False, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("model", "tensor_size", "message"),
    [
        (MistralConfig(**SHAPE), 1, "a mistral model: it builds llama, qwen2, qwen3; use fsdp"),
        (Qwen3Config(**SHAPE, hidden_act="gelu"), 1, "hidden_act = gelu"),
        (Qwen3Config(**SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), 1, "rope_type = yarn"),
        (LlamaConfig(**SHAPE, attention_bias=True), 1, "attention_bias"),
        (LlamaConfig(**SHAPE, mlp_bias=True), 1, "mlp_bias"),
        (Qwen2Config(**SHAPE, use_sliding_window=True), 1, "use_sliding_window"),
        (LlamaConfig(**SHAPE), 3, "--tensor-model-parallel-size 3 does not fit the model's num_attention_heads = 4"),
        (LlamaConfig(**(SHAPE | {"intermediate_size": 49}), num_key_value_heads=1), 2, "intermediate_size = 49"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_model_that_is_not_built_is_refused_by_name(model, tensor_size, message):
    with pytest.raises(ValueError, match=message):
        settings(model, tensor_size=tensor_size)


def test_the_vocabulary_is_padded_as_megatron_pads_it():
    assert [padded_vocabulary(*pair) for pair in ((37, 1), (128, 1), (129, 1), (300, 2), (151936, 4))] == [
        128, 128, 256, 512, 152064,
    ]  # fmt: skip


def test_weights_come_back_as_they_went():
    config = Qwen2Config(**SHAPE, num_key_value_heads=2)
    weights, names = {}, []
    for i in range(2):
        layer, query, value = f"model.layers.{i}", 32, 16
        for name, rows in (("q", query), ("k", value), ("v", value)):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = torch.randn(rows, 32)
            weights[f"{layer}.self_attn.{name}_proj.bias"] = torch.randn(rows)
        weights[f"{layer}.mlp.gate_proj.weight"], weights[f"{layer}.mlp.up_proj.weight"] = torch.randn(2, 48, 32)
        names += [f"decoder.layers.{i}.{name}" for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight")]
        names += [f"decoder.layers.{i}.self_attention.linear_qkv.bias"]
    weights["model.embed_tokens.weight"] = torch.randn(37, 32)
    names.append("embedding.word_embeddings.weight")
    there = WeightMap(config, None)
    back = {name: whole for megatron in names for name, whole in there.gather(megatron, there.shard(megatron, weights)).items()}
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    # a group's queries stand before its key and value
    fused = there.shard("decoder.layers.0.self_attention.linear_qkv.weight", weights)
    assert torch.equal(fused[16:24], weights["model.layers.0.self_attn.k_proj.weight"][:8])
    assert not there.shard("embedding.word_embeddings.weight", weights)[37:].any()


def test_an_incomplete_checkpoint_and_an_unknown_parameter_are_named():
    there = WeightMap(Qwen2Config(**SHAPE), None)
    with pytest.raises(ValueError, match="no model.norm.weight"):
        there.shard("decoder.final_layernorm.weight", {})
    with pytest.raises(ValueError, match="decoder.layers.0.mlp.router.weight has no known Hugging Face counterpart"):
        hugging_face_names("decoder.layers.0.mlp.router.weight")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the block does nothing")
def test_cuda_is_answered_by_the_cpu_inside_the_block_only():
    before = torch.cuda.current_device
    with megatron_on_cpu():
        assert torch.zeros(1, device="cuda").cuda().type() == "torch.cuda.FloatTensor"
        assert torch.empty(2, device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
    assert torch.cuda.current_device is before and torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
