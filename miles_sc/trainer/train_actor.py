"""The actor that trains: one rank of the policy."""

import argparse
import os
import socket
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from miles_sc.backends import Backend
from miles_sc.backends.fsdp import FsdpBackend
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch, build_micro_batch
from miles_sc.data.sharding import Shard
from miles_sc.loss.batch import LossBatch
from miles_sc.loss.hub import loss_function
from miles_sc.loss.metrics import combine_steps
from miles_sc.loss.scoring import full_vocabulary_log_probs, score
from miles_sc.parallel.groups import gather_columns, rank_in
from miles_sc.trainer.arguments import loss_settings, optimizer_settings
from miles_sc.trainer.layout import context_layout
from miles_sc.trainer.prompts import PromptCodec


class TrainActor:
    """Runs as a Ray actor. Every method is called on all ranks at once, since all of them hold collectives."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._rank, self._world_size = rank, world_size

    def rendezvous_address(self) -> str:
        """Where rank 0 will listen; a port that was free a moment ago."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Joins the process group, once; every run of a command uses it."""
        cuda = torch.cuda.is_available()
        if not cuda:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl" if cuda else "gloo", init_method=address, rank=self._rank, world_size=self._world_size)

    def prepare(self, args: argparse.Namespace) -> None:
        """Builds model, optimizer and loss of a run."""
        torch.manual_seed(args.rollout_seed)
        self._args = args
        self._backend = self._reference = None  # the last run's, before more is loaded
        self._backend = _build_backend(args, args.hf_checkpoint, optimizer_settings(args))
        if args.use_kl_loss:
            self._reference = _build_backend(args, args.ref_load or args.hf_checkpoint, None)
        self._layout, groups = context_layout(args), self._backend.groups
        self._settings = loss_settings(args, vocab_size=self._backend.vocab_size, tensor_group=groups.tensor)
        self._data_rank, self._context_rank = rank_in(groups.data), rank_in(groups.context)
        self._loss_function = loss_function(args.loss_type)
        self._pad_token_id = PromptCodec(args.hf_checkpoint, apply_chat_template=False).pad_token_id

    def train(self, shards: list[Any]) -> dict[str, float]:
        """Trains on this rank's shard, of a list with one per data-parallel rank. Metrics are over all its optimizer steps."""
        started = time.perf_counter()
        shard: Shard = ray.get(shards[self._data_rank])
        data = dict(shard.data)
        if self._args.ci_test:
            self._check_scoring(data, shard.steps[0][0])
        self._add_policy_log_probs(data, shard.steps)
        metrics = combine_steps([self._train_step(data, step) for step in shard.steps])
        return {f"train/{name}": value for name, value in metrics.items()} | {"perf/train_seconds": time.perf_counter() - started}

    def _train_step(self, data: dict[str, list], step: list[list[int]]) -> dict[str, float]:
        micro_batches = (self._micro_batch(data, members) for members in step)
        return self._backend.train_step(micro_batches, len(step), self._loss_function, self._settings)

    def _add_policy_log_probs(self, data: dict[str, list], steps: list[list[list[int]]]) -> None:
        """Log-probs of the policy before any step of this rollout, and of the reference, where the loss reads them."""
        passes = [members for step in steps for members in step]
        if self._args.loss_type == "policy_loss":
            if self._args.use_rollout_logprobs:
                data["old_log_probs"] = data["rollout_log_probs"]
            else:
                data["old_log_probs"] = self._scored(self._backend, data, passes, self._policy_log_probs)
        if self._reference is not None:
            data["ref_log_probs"] = self._scored(self._reference, data, passes, self._reference_log_probs)

    def _check_scoring(self, data: dict[str, list], members: list[int]) -> None:
        """``--ci-test``: the first micro-batch's sampled log-probs against a dense float64 softmax."""

        def difference(logits: torch.Tensor, batch: LossBatch) -> torch.Tensor:
            whole = gather_columns(logits, self._backend.groups.tensor)[:, : self._settings.vocab_size]
            dense = torch.log_softmax(whole.double() / self._settings.score_centering.temperature, dim=-1)
            dense = dense.gather(1, batch.token_ids[:, None])[:, 0]
            return (full_vocabulary_log_probs(logits, batch, self._settings) - dense).abs()

        differences = self._backend.score(self._micro_batch(data, members), difference)
        if differences.numel() and not differences.max() < 1e-4:
            raise ValueError(f"--ci-test: candidate scoring is {float(differences.max())} off a dense softmax; this is a bug")

    def _scored(self, backend: Backend, data: dict[str, list], passes: list[list[int]], function) -> list:
        """float32 ``[R]`` of each sample of the shard; a row that another context-parallel rank holds is NaN, and not read."""
        column: list = [None] * len(data["tokens"])
        for members in passes:
            micro_batch = self._micro_batch(data, members)
            scores = backend.score(micro_batch, function)
            for i, values in zip(members, micro_batch.by_sample(scores), strict=True):
                column[i] = values
        return column

    def _policy_log_probs(self, logits: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        return score(logits, batch, self._settings, with_head=False).sampled

    def _reference_log_probs(self, logits: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        return full_vocabulary_log_probs(logits, batch, self._settings)

    def _micro_batch(self, data: dict[str, list], members: list[int]) -> MicroBatch:
        return build_micro_batch(
            data,
            members,
            self._backend.device,
            pad_token_id=self._pad_token_id,
            layout=self._layout,
            rank=self._context_rank,
        )

    def export_weights(self) -> Any:
        """Whole float32 weights in the object store as numpy arrays; rank 0 returns a list of the one reference."""
        weights = self._backend.export_weights()
        return [ray.put({name: value.numpy() for name, value in weights.items()})] if self._rank == 0 else []

    def save(self, directory: str) -> None:
        """Writes this rank's share of a checkpoint."""
        self._backend.save(Path(directory))

    def load(self, directory: str) -> None:
        """Restores a checkpoint."""
        self._backend.load(Path(directory))


def _build_backend(args: argparse.Namespace, model_path: str, optimizer: OptimizerSettings | None) -> Backend:
    common = {
        "optimizer": optimizer,
        "bf16": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "recompute_loss": args.recompute_loss_function,
    }
    layout = context_layout(args)
    if args.train_backend == "fsdp":
        return FsdpBackend(model_path, layout=layout, **common)
    from miles_sc.backends.megatron import MegatronBackend  # an extra: FSDP does without it

    return MegatronBackend(model_path, layout=layout, tensor_size=args.tensor_model_parallel_size, **common)
