"""A tiny random Qwen3, an engine on it and request bodies for it."""

import torch
import transformers

from miles_sc.rollout.engines.embedded import EmbeddedEngine

VOCAB = 512
TRUE_VOCAB = 500
STOP = 1
AS_FLAT = {"return_flat_raw_output_top_logprobs": True}
AS_B64 = {**AS_FLAT, "return_flat_raw_top_logprobs_b64": True}
AS_SUPPORT = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}


def build_model(**changes):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 160,
            "initializer_range": 0.3,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def build_engine(model, **changes):
    return EmbeddedEngine(model, **{"stop_token_ids": [STOP], "pad_token_id": 0, "seed": 3, "vocab_size": TRUE_VOCAB, **changes})


def body(input_ids=(5, 6, 7), *, top=0, params=(), **fields):
    sampling = {"temperature": 0.8, "max_new_tokens": 6, "ignore_eos": True, **dict(params)}
    asked = {"top_logprobs_num": top} if top else {}
    return {"input_ids": list(input_ids), "sampling_params": sampling, "return_logprob": True, **asked, **fields}
