"""Pretrained weights as every backend reads them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load_causal_lm(path: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Hugging Face directory's causal LM on the CPU; nothing is fetched."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    for name in [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)  # dropout would make two passes over one batch differ
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"]))):
        raise ValueError(f"{path}: its weights lack {missing[0]} (of {len(missing)}), which would be random: is it complete?")
    return model
