"""What a server should have answered, by the Hugging Face model."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles_sc import ScoreCenteringConfig
from miles_sc.rollout.generate import GenerationSettings
from miles_sc.rollout.sample import Sample


def load(directory: Path, *, noise_seed: int | None = None) -> PreTrainedModel:
    """float32; with a seed, every weight is moved so far that hardly a log-prob stays within 0.1."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def settings(config: ScoreCenteringConfig, model: PreTrainedModel, *, tokens: int) -> GenerationSettings:
    return GenerationSettings(config, max_response_len=tokens, vocab_size=model.config.vocab_size, decode=lambda ids: str(ids))


def log_probs(model: PreTrainedModel, tokens: Sequence[int], temperature: float) -> np.ndarray:
    """float64 ``[tokens, V]``; row t is of the token after t."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0].double() / temperature, dim=-1).numpy()


def largest_error(sample: Sample, model: PreTrainedModel, temperature: float, rows: Iterable[int] | None = None) -> float:
    """Of the recorded log-probs, of sampled token and candidates, in some rows of the response or all; over the candidates alone
    where they are a filtered support."""
    first = len(sample.tokens) - sample.response_length
    reference = log_probs(model, sample.tokens, temperature)[first - 1 : -1]
    errors = [0.0]
    for row in range(sample.response_length) if rows is None else rows:
        expected = reference[row]
        valid = sample.rollout_topk_token_ids[row] >= 0
        ids = sample.rollout_topk_token_ids[row][valid]
        if sample.rollout_sampling_mask is not None:
            expected = expected - np.log(np.exp(expected[ids]).sum())
        errors.append(np.abs(sample.rollout_topk_log_probs[row][valid] - expected[ids]).max())
        errors.append(abs(sample.rollout_log_probs[row] - expected[sample.tokens[first + row]]))
    return float(max(errors))
