"""Which Hugging Face models the Megatron backend builds; asked before Megatron, or any process, is started."""

from transformers import PretrainedConfig

SUPPORTED = ("llama", "qwen2", "qwen3")


def check_supported(model: PretrainedConfig, tensor_size: int) -> None:
    """Refuses a model that is not built, or whose heads do not fit the tensor-parallel ranks.

    Raises:
        ValueError: what it is, and what to use.
    """
    if model.model_type not in SUPPORTED:
        raise ValueError(f"--train-backend megatron with a {model.model_type} model: it builds {', '.join(SUPPORTED)}; use fsdp")
    if model.hidden_act != "silu":
        raise ValueError(
            f"--train-backend megatron with hidden_act = {model.hidden_act}: it builds silu; use --train-backend fsdp"
        )
    rope_type = model.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(
            f"--train-backend megatron with rope_type = {rope_type}: it builds the default; use --train-backend fsdp"
        )
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(model, name, False) and not (name == "attention_bias" and model.model_type == "qwen2"):
            raise ValueError(f"--train-backend megatron with {name}: it is not built here; use --train-backend fsdp")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(model, name)
        # fewer key-value heads than ranks: several ranks then share one
        shared = name == "num_key_value_heads" and tensor_size % value == 0
        if value % tensor_size and not shared:
            raise ValueError(
                f"--tensor-model-parallel-size {tensor_size} does not fit the model's {name} = {value}: set a divisor of it"
            )
