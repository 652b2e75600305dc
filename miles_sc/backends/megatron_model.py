"""A Hugging Face model of the Llama and Qwen families as Megatron-Core's GPT model."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from miles_sc.backends.megatron_attention import GatheredAttention, RotaryAtPositions
from miles_sc.backends.megatron_support import check_supported
from miles_sc.parallel.context import ContextLayout

VOCABULARY_MULTIPLE = 128  # Megatron pads each rank's share of the vocabulary to a multiple of this


def transformer_config(
    model: PretrainedConfig, *, tensor_size: int, layout: ContextLayout, bf16: bool, gradient_checkpointing: bool
) -> TransformerConfig:
    """Megatron's settings for a Hugging Face configuration.

    Raises:
        ValueError: an architecture, an activation or a rotary scaling that is not built here, or heads that do not divide.
    """
    check_supported(model, tensor_size)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_size(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=model.model_type == "qwen3",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_size,
        context_parallel_size=layout.size,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **(recompute if gradient_checkpointing else {}),
    )


def build_gpt_model(model: PretrainedConfig, config: TransformerConfig, layout: ContextLayout) -> GPTModel:
    """This rank's part of the model, on its device, weights not yet loaded. Megatron's groups must exist."""
    ours = uses_gathered_attention(layout)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, gathered_attention=ours),
        vocab_size=padded_vocabulary(model.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        parallel_output=True,
    )
    if ours:
        # "mrope" is the kind whose positions Megatron leaves to the caller
        gpt.position_embedding_type, gpt.mrope_section = "mrope", None
        gpt.rotary_pos_emb = RotaryAtPositions(gpt.rotary_pos_emb.inv_freq)
    return gpt.to(torch.cuda.current_device()) if torch.cuda.is_available() else gpt


def uses_gathered_attention(layout: ContextLayout) -> bool:
    """Whether attention is ours: wherever Transformer Engine's does not serve, on the CPU and in the all-gather layouts."""
    return (layout.allgather and layout.size > 1) or not _has_transformer_engine()


def head_size(model: PretrainedConfig) -> int:
    """Channels of one attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def padded_vocabulary(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks."""
    multiple = VOCABULARY_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


def _layer_spec(config: TransformerConfig, *, gathered_attention: bool) -> ModuleSpec:
    if _has_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    if gathered_attention:
        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


def _has_transformer_engine() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True
