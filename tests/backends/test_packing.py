"""Which models keep samples apart that are packed into one row."""

import pytest
import torch
import transformers as hf

from miles_sc.backends.fsdp import _refuse_mixed_samples

SHAPE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def opt():
    """Learned positions that it counts by itself."""
    config = hf.OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, init_std=0.3)
    return hf.OPTForCausalLM(config)


def lfm2():
    """Convolutions along the row."""
    config = hf.Lfm2Config(**SHAPE, intermediate_size=48, num_key_value_heads=2, full_attn_idxs=[1], initializer_range=0.3)
    return hf.Lfm2ForCausalLM(config)


def qwen3():
    config = hf.Qwen3Config(**SHAPE, intermediate_size=48, num_key_value_heads=2, head_dim=8, initializer_range=0.3)
    return hf.Qwen3ForCausalLM(config)


def gpt2():
    config = hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    return hf.GPT2LMHeadModel(config)


@pytest.mark.parametrize("build", [opt, lfm2])
def test_a_model_that_mixes_packed_samples_is_refused(build):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="--qkv-format thd: .* see each other .*; set --qkv-format bshd"):
        _refuse_mixed_samples(build())


@pytest.mark.parametrize("build", [qwen3, gpt2])
def test_a_model_that_keeps_them_apart_is_not(build):
    torch.manual_seed(0)
    _refuse_mixed_samples(build())
