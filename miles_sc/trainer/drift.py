"""How far the clean policy has walked from its start: exact KL on fixed held-out text."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

# the start's whole distribution is kept for every probed position, so their number is bounded
PROBE_BYTES = 128 << 20
SEQUENCES = 16  # at once


class DriftProbe:
    """KL(start || policy) per token, over the full vocabulary, on responses that the start itself drew."""

    def __init__(
        self, model: PreTrainedModel, sequences: list[list[int]], response_lengths: list[int], temperature: float
    ) -> None:
        """
        Args:
            model: still holds the start's weights; later calls of :meth:`measure` read its weights then.
            sequences: prompt and response ids.
            response_lengths: trailing ids of each that are response.
            temperature: the distribution's, that of the rollout.
        """
        self._model, self._temperature = model, temperature
        pairs = [(ids, n) for ids, n in zip(sequences, response_lengths, strict=True) if n > 0]
        if not pairs:
            raise ValueError("every response to the held-out prompts was empty: there is nothing to measure drift on")
        most = PROBE_BYTES // (4 * model.config.vocab_size)
        kept = int(np.searchsorted(np.cumsum([n for _, n in pairs]), most, side="right"))
        pairs = pairs[: max(kept, 1)]
        width = max(len(ids) for ids, _ in pairs)
        self._input_ids = torch.zeros(len(pairs), width, dtype=torch.long, device=model.device)
        self._predicting = torch.zeros_like(self._input_ids, dtype=torch.bool)
        for row, (ids, n) in enumerate(pairs):
            self._input_ids[row, : len(ids)] = torch.tensor(ids)
            self._predicting[row, len(ids) - n - 1 : len(ids) - 1] = True
        self._start = self._log_probs()

    def measure(self) -> float:
        """Mean nats per token."""
        current = self._log_probs()
        total = sum(float((p.exp() * (p - q)).sum(dtype=torch.float64)) for p, q in zip(self._start, current, strict=True))
        return total / sum(len(p) for p in self._start)

    @torch.inference_mode()
    def _log_probs(self) -> list[Tensor]:
        """float32 ``[positions, V]`` of each slice of the probe."""
        parts = []
        for ids, predicting in zip(self._input_ids.split(SEQUENCES), self._predicting.split(SEQUENCES), strict=True):
            logits = self._model(input_ids=ids, use_cache=False).logits[predicting].float() / self._temperature
            parts.append(logits - logits.logsumexp(dim=-1, keepdim=True))
        return parts
