"""The actor that samples: engine, task and verifier, conversion and sharding, clean evaluation."""

import argparse
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
from transformers import PreTrainedModel

from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.config import ScoreCenteringConfig
from miles_sc.data.conversion import samples_to_train_data
from miles_sc.data.sharding import shard
from miles_sc.rollout.engines import Engine
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.rollout.generate import (
    GenerationSettings,
    all_or_none,
    generate_conversation,
    generate_response,
    greedy_responses,
)
from miles_sc.rollout.sample import Sample
from miles_sc.trainer.collection import Group, collect
from miles_sc.trainer.drift import DriftProbe
from miles_sc.trainer.engines import MismatchedEngine, embedded_engine
from miles_sc.trainer.environments import VerifierFeedback
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
    """Runs as an asynchronous Ray actor; its methods still run one after the other (``max_concurrency=1``), what is concurrent
    is inside them. One process serves every run of a command."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        # the libraries' objects are here to stay; without this each full collection looks at them all, for over 0.1 s
        gc.collect()
        gc.freeze()
        self._engine: Engine | None = None

    async def prepare(self, args: argparse.Namespace) -> None:
        """Loads model and task of a run, and fixes the text on which its drift is measured.

        Raises:
            ValueError: a task, model directory, engine or number of candidates that cannot be had.
        """
        await self.close()  # the last run's engine, before more is loaded
        self._args = args
        # so that weights of the same number from another run, which a server may still hold, are not taken for this one's
        self._run = uuid4().hex[:8]
        self._clean_model = self._clean_engine = self._probe = None
        self._config = ScoreCenteringConfig.from_args(args)
        self._task = task_from_args(args, seed=args.rollout_seed)
        self._codec = PromptCodec(args.hf_checkpoint, apply_chat_template=args.apply_chat_template)
        # two models: what samples may differ from the trainer, what is evaluated never does
        self._clean_model = self._load_model()
        self._vocab_size = self._clean_model.config.vocab_size
        self._config.check_vocabulary(self._vocab_size)
        self._clean_engine = embedded_engine(args, self._clean_model, self._codec)
        self._held_out = self._task.held_out()
        self._observation = self._codec.encode_observation(args.observation) if args.max_turns > 1 else []
        self._unfinished: list[Group] = []
        self._next_problem = 0
        self._probe = await self._start_probe()
        self._examine: Callable[[], Awaitable[None]] | None = None
        self._engine = await self._start_engine()

    async def close(self) -> None:
        """Stops the engine; servers that it launched end with it."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    async def _start_engine(self) -> Engine:
        args = self._args
        mismatch = parse_mismatch(args.rollout_mismatch, seed=args.rollout_seed)
        if args.rollout_engine == "sglang":
            from miles_sc.trainer.sglang_engine import (
                examine_routes,
                start_sglang_engine,
            )  # an HTTP client that nobody else needs

            asked = {"vocab_size": self._vocab_size, "prompt_ids": self._encode(self._held_out[0])}
            engine = await start_sglang_engine(args, self._config, **asked)
            self._examine = partial(examine_routes, engine, self._config, **asked)
            return engine if args.rollout_mismatch == "none" else MismatchedEngine(engine, self._load_model(), mismatch)
        return embedded_engine(args, self._load_model(), self._codec, mismatch)

    async def _start_probe(self) -> DriftProbe:
        samples = [Sample(tokens=self._encode(problem), index=i) for i, problem in enumerate(self._held_out)]
        settings = self._generation_settings(ScoreCenteringConfig(temperature=self._config.temperature))
        # the clean engine still holds the run's first weights
        await all_or_none(
            generate_response(self._clean_engine, sample, settings, sampling_seed=_PROBE_SEED + sample.index)
            for sample in samples
        )
        return DriftProbe(
            self._clean_model,
            [sample.tokens for sample in samples],
            [sample.response_length for sample in samples],
            self._config.temperature,
        )

    async def rollout(self, number: int, weights: dict[str, np.ndarray], version: str) -> Rollout:
        """Samples, rewards, converts and shards rollout ``number``; the same number always asks the same problems, unless
        responses of earlier rollouts are still to be continued.

        Args:
            weights, version: what the sampler is given before it is made to differ.
        """
        args, started = self._args, time.perf_counter()
        groups = await self._collect(number, weights, version)
        generated = time.perf_counter() - started
        samples = [sample for group in groups for sample in group.samples]
        for group in groups:
            for sample in group.samples:
                sample.reward = self._task.reward(group.problem, self._answer(sample))
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

    async def _collect(self, number: int, weights: dict[str, np.ndarray], version: str) -> list[Group]:
        args = self._args
        await self._engine.update_weights(weights, f"{self._run}-{version}")
        if self._examine is not None:
            # once more with the run's own weights, before its first response
            await self._examine()
            self._examine = None
        # a continued run starts where an uninterrupted one without unfinished groups would be
        self._next_problem = max(self._next_problem, number * args.rollout_batch_size)
        groups = list(self._unfinished)
        while len(groups) < (args.over_sampling_batch_size or args.rollout_batch_size):
            groups.append(self._group(self._next_problem))
            self._next_problem += 1
        complete, self._unfinished = await collect(self._engine, groups, args.rollout_batch_size, self._respond)
        if not args.partial_rollout:
            for sample in (sample for group in self._unfinished for sample in group.samples):
                sample.reset_for_retry()
        return complete

    async def _respond(self, engine: Engine, group: Group, sample: Sample) -> None:
        args, settings = self._args, self._generation_settings(self._config)
        if args.max_turns == 1:
            return await generate_response(engine, sample, settings, sampling_seed=sample.index)
        environment = VerifierFeedback(group.problem, self._task.reward, self._observation)
        return await generate_conversation(
            engine, sample, settings, environment, max_turns=args.max_turns, sampling_seed=sample.index
        )

    async def evaluate(self, weights: dict[str, np.ndarray], version: str) -> dict[str, float]:
        """The clean trainer policy on the held-out set: greedy reward, and KL from the start."""
        prompts = [self._encode(problem) for problem in self._held_out]
        most = self._args.rollout_max_response_len
        await self._clean_engine.update_weights(weights, version)
        responses = await greedy_responses(self._clean_engine, prompts, max_new_tokens=most)
        rewards = [
            self._task.reward(problem, self._codec.decode(response))
            for problem, response in zip(self._held_out, responses, strict=True)
        ]
        return {"eval/reward": float(np.mean(rewards)), "eval/kl_from_start": self._probe.measure()}

    async def save_model(self, weights: dict[str, np.ndarray], version: str, directory: str) -> None:
        """Writes the clean policy as a Hugging Face directory, tokenizer included."""
        await self._clean_engine.update_weights(weights, version)
        with whole_directory(Path(directory)) as unfinished:
            self._clean_model.save_pretrained(unfinished)
            self._codec.tokenizer.save_pretrained(unfinished)

    def _load_model(self) -> PreTrainedModel:
        model = load_causal_lm(self._args.hf_checkpoint, dtype=torch.bfloat16 if self._args.bf16 else torch.float32)
        return model.to("cuda") if torch.cuda.is_available() else model

    def _generation_settings(self, config: ScoreCenteringConfig) -> GenerationSettings:
        codec = self._codec
        return GenerationSettings(
            config, self._args.rollout_max_response_len, self._vocab_size, codec.decode, tuple(codec.stop_token_ids)
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

    def _group(self, number: int) -> Group:
        problem, size = self._task.train(number), self._args.n_samples_per_prompt
        prompt = self._encode(problem)
        samples = [Sample(tokens=list(prompt), index=number * size + i, group_index=number) for i in range(size)]
        return Group(number, problem, samples)

    def _answer(self, sample: Sample) -> str:
        """What is rewarded: the policy's last turn."""
        return self._codec.decode(sample.newest_turn())

    def _metrics(self, samples: list[Sample], generate_seconds: float, seconds: float) -> dict[str, float]:
        tokens = sum(sample.response_length for sample in samples)
        metrics = {
            "rollout/reward": float(np.mean([sample.reward for sample in samples])),
            "rollout/response_length": tokens / len(samples),
            "rollout/truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
            "perf/rollout_tokens_per_second": tokens / generate_seconds,
            "perf/generate_seconds": generate_seconds,
            "perf/rollout_seconds": seconds,
        }
        if self._args.max_turns > 1:
            metrics["rollout/turns"] = float(np.mean([sample.turns for sample in samples]))
        if self._args.partial_rollout:
            metrics["rollout/mixed_versions_fraction"] = float(
                np.mean([len(set(sample.weight_versions) - {""}) > 1 for sample in samples])
            )
        return metrics
