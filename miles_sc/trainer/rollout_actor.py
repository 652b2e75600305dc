"""The actor that samples: engine, task and verifier, conversion and sharding, clean evaluation."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import PreTrainedModel

from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.config import ScoreCenteringConfig
from miles_sc.data.conversion import samples_to_train_data
from miles_sc.data.sharding import shard
from miles_sc.rollout.engines.embedded import EmbeddedEngine
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.rollout.generate import generate_responses, greedy_responses
from miles_sc.rollout.sample import Sample
from miles_sc.trainer.drift import DriftProbe
from miles_sc.trainer.files import whole_directory
from miles_sc.trainer.layout import context_layout, data_parallel_size
from miles_sc.trainer.prompts import PromptCodec
from miles_sc.trainer.tasks import Problem, task_from_args
from miles_sc.trainer.validation import global_batch_size

# kept apart from training's sampling seeds, which are sample numbers
_PROBE_SEED = 1 << 40


@dataclass(frozen=True)
class Rollout:
    """One rollout on its way to the train actors.

    Attributes:
        shards: an object reference per data-parallel rank; the driver never fetches what they point at.
        metrics: ``rollout/...`` and ``perf/...``.
    """

    shards: list[Any]
    metrics: dict[str, float]


class RolloutActor:
    """Runs as a Ray actor; all of its methods run one after the other. One process serves every run of a command."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def prepare(self, args: argparse.Namespace) -> None:
        """Loads model and task of a run, and fixes the text on which its drift is measured.

        Raises:
            ValueError: a task, model directory or number of candidates that cannot be had.
        """
        self._args = args
        self._clean_model = self._clean_engine = self._engine = self._probe = None  # the last run's, before more is loaded
        self._config = ScoreCenteringConfig.from_args(args)
        self._task = task_from_args(args, seed=args.rollout_seed)
        self._codec = PromptCodec(args.hf_checkpoint, apply_chat_template=args.apply_chat_template)
        # two models: what samples may differ from the trainer, what is evaluated never does
        self._clean_model = self._load_model()
        self._vocab_size = self._clean_model.config.vocab_size
        self._config.check_vocabulary(self._vocab_size)
        self._clean_engine = self._engine_on(self._clean_model, "none")
        self._engine = self._engine_on(self._load_model(), args.rollout_mismatch)
        self._held_out = self._task.held_out()
        self._probe = self._start_probe()

    def _start_probe(self) -> DriftProbe:
        samples = [Sample(tokens=self._encode(problem), index=i) for i, problem in enumerate(self._held_out)]
        unrecorded = ScoreCenteringConfig(temperature=self._config.temperature)
        # the clean engine still holds the run's first weights
        self._generate(self._clean_engine, samples, unrecorded, [_PROBE_SEED + sample.index for sample in samples])
        return DriftProbe(
            self._clean_model,
            [sample.tokens for sample in samples],
            [sample.response_length for sample in samples],
            self._config.temperature,
        )

    def rollout(self, number: int, weights: dict[str, np.ndarray], version: str) -> Rollout:
        """Samples, rewards, converts and shards rollout ``number``; the same number always asks the same problems.

        Args:
            weights, version: what the sampler is given before it is made to differ.
        """
        args, started = self._args, time.perf_counter()
        self._engine.update_weights(weights, version)
        problems = [self._task.train(number * args.rollout_batch_size + i) for i in range(args.rollout_batch_size)]
        samples = self._samples(problems, first=number * args.rollout_batch_size * args.n_samples_per_prompt)
        self._generate(self._engine, samples, self._config, [sample.index for sample in samples])
        generated = time.perf_counter() - started
        for sample in samples:
            sample.reward = self._task.reward(problems[sample.group_index], sample.response)
        data = samples_to_train_data(
            samples,
            self._config,
            vocab_size=self._vocab_size,
            normalize_rewards=not args.disable_rewards_normalization,
            normalize_std=not args.disable_grpo_std_normalization,
        )
        shards = shard(
            data,
            world_size=data_parallel_size(args),
            global_batch_size=global_batch_size(args),
            per_token=args.calculate_per_token_loss,
            micro_batch_size=args.micro_batch_size,
            max_tokens=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            layout=context_layout(args),
        )
        return Rollout([ray.put(part) for part in shards], self._metrics(samples, generated, time.perf_counter() - started))

    def evaluate(self, weights: dict[str, np.ndarray], version: str) -> dict[str, float]:
        """The clean trainer policy on the held-out set: greedy reward, and KL from the start."""
        self._clean_engine.update_weights(weights, version)
        prompts = [self._encode(problem) for problem in self._held_out]
        texts = greedy_responses(
            self._clean_engine, prompts, max_new_tokens=self._args.rollout_max_response_len, decode=self._codec.decode
        )
        rewards = [self._task.reward(problem, text) for problem, text in zip(self._held_out, texts, strict=True)]
        return {"eval/reward": float(np.mean(rewards)), "eval/kl_from_start": self._probe.measure()}

    def save_model(self, weights: dict[str, np.ndarray], version: str, directory: str) -> None:
        """Writes the clean policy as a Hugging Face directory, tokenizer included."""
        self._clean_engine.update_weights(weights, version)
        with whole_directory(Path(directory)) as unfinished:
            self._clean_model.save_pretrained(unfinished)
            self._codec.tokenizer.save_pretrained(unfinished)

    def _load_model(self) -> PreTrainedModel:
        model = load_causal_lm(self._args.hf_checkpoint, dtype=torch.bfloat16 if self._args.bf16 else torch.float32)
        return model.to("cuda") if torch.cuda.is_available() else model

    def _engine_on(self, model: PreTrainedModel, mismatch: str) -> EmbeddedEngine:
        return EmbeddedEngine(
            model,
            stop_token_ids=self._codec.stop_token_ids,
            pad_token_id=self._codec.pad_token_id,
            seed=self._args.rollout_seed,
            mismatch=parse_mismatch(mismatch, seed=self._args.rollout_seed),
        )

    def _encode(self, problem: Problem) -> list[int]:
        prompt, most = self._codec.encode(problem.prompt), self._clean_model.config.max_position_embeddings
        if not prompt:
            raise ValueError(f"the prompt {problem.prompt!r} has no tokens: is the tokenizer complete?")
        if len(prompt) + self._args.rollout_max_response_len > most:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens ({problem.prompt[:40]!r}...) and --rollout-max-response-len "
                f"{self._args.rollout_max_response_len} pass the model's {most} positions: shorten one of them"
            )
        return prompt

    def _samples(self, problems: list[Problem], first: int) -> list[Sample]:
        samples = []
        for group, problem in enumerate(problems):
            prompt = self._encode(problem)
            for _ in range(self._args.n_samples_per_prompt):
                samples.append(Sample(tokens=list(prompt), index=first + len(samples), group_index=group))
        return samples

    def _generate(self, engine: EmbeddedEngine, samples: list[Sample], config: ScoreCenteringConfig, seeds: list[int]) -> None:
        generate_responses(
            engine,
            samples,
            config,
            max_new_tokens=self._args.rollout_max_response_len,
            vocab_size=self._vocab_size,
            decode=self._codec.decode,
            sampling_seeds=seeds,
        )

    def _metrics(self, samples: list[Sample], generate_seconds: float, seconds: float) -> dict[str, float]:
        tokens = sum(sample.response_length for sample in samples)
        return {
            "rollout/reward": float(np.mean([sample.reward for sample in samples])),
            "rollout/response_length": tokens / len(samples),
            "rollout/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
            "perf/rollout_tokens_per_second": tokens / generate_seconds,
            "perf/generate_seconds": generate_seconds,
            "perf/rollout_seconds": seconds,
        }
