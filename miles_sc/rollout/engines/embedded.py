"""A sampler on a Hugging Face causal LM in this process, answering in the wire of SGLang's native ``/generate``."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from miles_sc.rollout.engines.batch import Batch, Generation, TokenRecords, split_waves
from miles_sc.rollout.engines.mismatch import Mismatch, NoMismatch
from miles_sc.rollout.engines.native_request import ModelLimits, NativeRequest, parse_request
from miles_sc.rollout.engines.native_response import build_answer
from miles_sc.rollout.engines.sampling import draw_tokens
from miles_sc.rollout.engines.weights import load_weights

_COUNTED_STREAM, _SEEDED_STREAM = 0, 1


class EmbeddedEngine:
    """A sampler without a server, see `InProcessEngine`: left-padded batches, a KV cache, and exact bookkeeping of the sampling
    distribution.

    The reported distribution is the one that is sampled from. Unfiltered: float32 logits over the true vocabulary,
    divided by the temperature, minus their logsumexp. Filtered (``top_k``, ``top_p``): the renormalised support.
    ``output_token_logprobs`` and top log-probs are full-vocabulary values in both, as on the server.

    Each request draws from a random stream of its own, keyed by ``seed`` and its ``sampling_seed``, or by ``seed`` and
    how many requests without one came before it in the life of the engine. So what is in the batch beside it does not
    matter, up to the model's own rounding, which may differ with the batch's shape and, rarely, flip a token. Give
    ``sampling_seed`` where a restart must repeat itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        vocab_size: int | None = None,
        max_batch_tokens: int = 65536,
        detokenize: Callable[[list[int]], str] | None = None,
        mismatch: Mismatch | None = None,
    ):
        """
        Args:
            model: owned by the engine from here on: its weights are overwritten, and it is put in evaluation mode.
            stop_token_ids: end a sequence unless the request says ``ignore_eos``.
            pad_token_id: fills prompts on the left; any id of the embedding serves.
            seed: of every random stream, not negative.
            vocab_size: the true vocabulary; logit columns from there on are padding and never drawn. Default: the
                config's.
            max_batch_tokens: bound on rows x (longest prompt + longest answer) decoded together. A single request may
                pass it.
            detokenize: token ids -> text; without it ``text`` is empty.
            mismatch: makes the weights differ from those loaded, now and after every update. Default: none.

        Raises:
            ValueError: an argument outside its range.
        """
        config = model.config.get_text_config()
        rows = model.get_input_embeddings().weight.shape[0]
        vocab_size = config.vocab_size if vocab_size is None else vocab_size
        _check_in_range("vocab_size", vocab_size, 1, min(rows, config.vocab_size))
        _check_in_range("pad_token_id", pad_token_id, 0, rows - 1)
        _check_in_range("seed", seed, 0, None)
        _check_in_range("max_batch_tokens", max_batch_tokens, 1, None)
        for token_id in stop_token_ids:
            _check_in_range("stop_token_ids", token_id, 0, vocab_size - 1)

        self.weight_version = "default"
        self._model = model.eval()
        self._limits = ModelLimits(vocab_size, getattr(config, "max_position_embeddings", None), tuple(map(int, stop_token_ids)))
        self._pad_token_id = pad_token_id
        self._seed = seed
        self._max_batch_tokens = max_batch_tokens
        self._detokenize = detokenize
        self._mismatch = mismatch or NoMismatch()
        self._counted_requests = 0
        # transformers renamed `past_key_values` to `cache`; older 5.x releases know only the former.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

        if not self._mismatch.remembered:
            self._mismatch.remember(model)
        self._mismatch.apply(model)

    def update_weights(self, state: Mapping[str, np.ndarray | Tensor], version: str) -> None:
        """Copies ``state`` into the model in place, then applies the mismatch. ``state`` is only read; see
        `load_weights`.

        Raises:
            ValueError: ``state`` does not fit, in which case weights and version are as before; or an empty version.
        """
        if not isinstance(version, str) or not version:
            raise ValueError(f"version={version!r} must be a non-empty string; name the weights")
        load_weights(self._model, state)
        self._mismatch.apply(self._model)
        self.weight_version = version

    def generate(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers bodies of native ``/generate``, each with its own prompt and settings, in their order.

        Raises:
            ValueError: a request that cannot be honoured to the letter (see `parse_request`), before any token is
                drawn; or logits that are not finite.
        """
        started = time.perf_counter()
        parsed = [
            parse_request(body, self._limits, place=f"request {index} of {len(requests)}") for index, body in enumerate(requests)
        ]
        generators = [self._generator(request) for request in parsed]
        generations = [Generation.empty() for _ in parsed]
        for wave in split_waves(parsed, self._max_batch_tokens):
            decoded = self._decode([parsed[index] for index in wave], [generators[index] for index in wave])
            for index, generation in zip(wave, decoded, strict=True):
                generations[index] = generation
        latency = time.perf_counter() - started
        return [
            build_answer(
                request,
                generation,
                detokenize=self._detokenize,
                weight_version=self.weight_version,
                latency=latency,
            )
            for request, generation in zip(parsed, generations, strict=True)
        ]

    @torch.inference_mode()
    def _decode(self, requests: list[NativeRequest], generators: list[np.random.Generator]) -> list[Generation]:
        batch = Batch.start(requests, generators, self._model.device, self._limits.vocab_size)
        records = TokenRecords(requests)
        cache = DynamicCache(config=self._model.config)
        logits = self._prefill(batch, cache)
        while True:
            draw = draw_tokens(logits, batch.sampler, batch.next_uniforms(), batch.head_width)
            records.append(batch, draw)
            batch.advance(draw.token_ids, self._limits.max_positions)
            if batch.done:
                return list(records.generations())
            newest = draw.token_ids
            kept = batch.leave()
            if kept is not None:
                cache.batch_select_indices(kept)
                newest = newest[kept]
            mask = batch.attention_mask[:, : batch.width]
            logits = self._forward(newest[:, None], mask, batch.positions[:, None], cache)

    def _prefill(self, batch: Batch, cache: DynamicCache) -> Tensor:
        """Logits ``[B, V]`` after the prompts. Equal prompts, the samples of one group, are computed once."""
        place_of: dict[tuple[int, ...], int] = {}
        owner = [place_of.setdefault(request.input_ids, len(place_of)) for request in batch.requests]
        padded = torch.full((len(place_of), batch.width), self._pad_token_id, dtype=torch.int64)
        for input_ids, place in place_of.items():
            padded[place, batch.width - len(input_ids) :] = torch.tensor(input_ids)
        first = [owner.index(place) for place in range(len(place_of))]
        mask = batch.attention_mask[first, : batch.width]
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward(padded.to(mask.device), mask, positions, cache)
        if len(place_of) == len(owner):
            return logits
        expand = torch.tensor(owner, device=mask.device)
        cache.batch_select_indices(expand)
        return logits[expand]

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._last_logits_only,
        )
        return output.logits[:, -1, : self._limits.vocab_size]

    def _generator(self, request: NativeRequest) -> np.random.Generator:
        if request.sampling_seed is None:
            key = (_COUNTED_STREAM, self._counted_requests)
            self._counted_requests += 1
        else:
            key = (_SEEDED_STREAM, request.sampling_seed)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=key)))


def _check_in_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"EmbeddedEngine: {name}={value} must be {bound}; set it so")
