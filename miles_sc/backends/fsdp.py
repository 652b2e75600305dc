"""A Hugging Face causal LM under FSDP2 (``fully_shard``): gloo on CPUs, NCCL where CUDA is there."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles_sc.backends import ScoreFunction
from miles_sc.backends.optimizer_step import check_gradient_norm, learning_rate, micro_batch_loss, raise_on_every_rank
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.response_rows import ResponseRows
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import LossFunction
from miles_sc.loss.metrics import StepMetrics
from miles_sc.parallel.groups import ParallelGroups


class FsdpBackend:
    """One data-parallel rank of the policy. The default process group must be initialised."""

    def __init__(
        self,
        model_path: str,
        *,
        optimizer: OptimizerSettings | None,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        recompute_loss: bool = False,
    ) -> None:
        """Args:
        model_path: a Hugging Face directory.
        optimizer: None for a model that only scores, a reference.
        bf16: compute in bfloat16; parameters, their gradients' reduction and the optimizer stay float32.
        recompute_loss: rerun the loss in backward instead of keeping what it saved.
        """
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.world_size = dist.get_world_size()
        self.groups = ParallelGroups(data=dist.group.WORLD, rows=dist.group.WORLD)
        self.settings = optimizer
        self.steps = 0
        self.recompute_loss = recompute_loss
        self.model = _sharded_model(model_path, self.device, bf16=bf16, gradient_checkpointing=gradient_checkpointing)
        self._response_rows = ResponseRows(self.model.get_output_embeddings())
        self.optimizer = None if optimizer is None else _build_optimizer(self.model, optimizer)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, all of which the sampler draws from."""
        return self.model.config.vocab_size

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """``[T, V]`` at the response rows; no other row is projected to the vocabulary."""
        # samples packed into one row must not see each other; a row of its own needs the causal mask only
        mask = micro_batch.attention_mask()[:, None] if micro_batch.layout.packed else None
        with self._response_rows.select(micro_batch.rows):
            output = self.model(
                input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, attention_mask=mask, use_cache=False
            )
        return output.logits[0]

    @torch.no_grad()
    def score(self, micro_batches: Iterable[MicroBatch], function: ScoreFunction) -> list[Tensor]:
        """``function(logits, batch) -> [T]`` of each micro-batch, without graph: log-probs before a step, say."""
        self.model.eval()
        return [function(self.logits(micro_batch), micro_batch.loss) for micro_batch in micro_batches]

    def train_step(
        self, micro_batches: Iterable[MicroBatch], passes: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Forward and backward over the micro-batches of one optimizer step, then the step.

        Collectives: FSDP's own, one flag, the gradient norm's, two of the metrics.

        Args:
            micro_batches: built as they are needed.
            passes: how many there are; the same on every rank.

        Raises:
            ValueError: a trained token or the gradient norm is not finite; no parameter has changed then.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        guard, metrics = FiniteGuard(), StepMetrics()
        for number, micro_batch in enumerate(micro_batches, start=1):
            self.model.set_requires_gradient_sync(number == passes)
            guard.watch(micro_batch.describe)
            logits = self.logits(micro_batch)
            output = micro_batch_loss(logits, micro_batch.loss, loss_function, settings, guard, recompute=self.recompute_loss)
            # the weights already divide by the whole step, and FSDP averages over ranks
            (output.loss * self.world_size).backward()
            metrics.add(output.token_metrics, micro_batch.loss)
        if number != passes:
            raise ValueError(
                f"{number} micro-batches came and {passes} were announced: the gradient was never reduced over ranks"
            )
        raise_on_every_rank(guard, self.device)
        norm = self._clip_gradient()
        self.steps += 1
        lr = learning_rate(self.settings, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return metrics.reduce(self.groups.rows) | {"grad_norm": norm, "lr": lr}

    def _clip_gradient(self) -> float:
        limit = self.settings.clip_grad if self.settings.clip_grad > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        check_gradient_norm(norm)
        return norm

    def export_weights(self) -> dict[str, Tensor]:
        """Whole float32 parameters on the CPU under Hugging Face names, on rank 0; empty elsewhere. Every rank must call."""
        exported = {}
        for name, value in self.model.state_dict().items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                if not value.isfinite().all():
                    raise ValueError(f"{name} holds NaN or infinity after the last update: the run has diverged; lower --lr")
                exported[name] = value.detach().to("cpu", copy=True)
        return exported

    def save(self, directory: Path) -> None:
        """Writes parameters and optimizer state, sharded. Every rank must call; OSError if it cannot be written."""
        try:
            dcp.save(self._state(), checkpoint_id=str(directory))
        except dcp.api.CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(
                f"checkpoint {directory}: rank {rank} cannot write it ({cause}); is the disk full? choose another --save"
            ) from error

    def load(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote, to the bit on the same number of ranks."""
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=str(directory))
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise ValueError(
                f"checkpoint {directory} cannot be read ({type(error).__name__}): damaged, or of another model? remove it, or "
                "name another --load"
            ) from error
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])

    def _state(self) -> dict:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "steps": torch.tensor(self.steps),
        }


def _sharded_model(path: str, device: torch.device, *, bf16: bool, gradient_checkpointing: bool) -> PreTrainedModel:
    model = load_causal_lm(path).to(device)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _build_optimizer(model: PreTrainedModel, settings: OptimizerSettings) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    # norms and biases do not decay, as in Megatron
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)
