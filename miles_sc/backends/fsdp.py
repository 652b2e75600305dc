"""A Hugging Face causal LM under FSDP2 (``fully_shard``): gloo on CPUs, NCCL where CUDA is there."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossBatch, LossOutput, LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import LossFunction
from miles_sc.loss.metrics import StepMetrics

ScoreFunction = Callable[[Tensor, LossBatch], Tensor]


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
        self.settings = optimizer
        self.steps = 0
        self.recompute_loss = recompute_loss
        self.model = _sharded_model(model_path, self.device, bf16=bf16, gradient_checkpointing=gradient_checkpointing)
        self._response_rows = _ResponseRows(self.model)
        self.optimizer = None if optimizer is None else _build_optimizer(self.model, optimizer)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, all of which the sampler draws from."""
        return self.model.config.vocab_size

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """``[T, V]`` at the response rows; no other row is projected to the vocabulary."""
        with self._response_rows.select(micro_batch.rows):
            return self.model(input_ids=micro_batch.input_ids, use_cache=False).logits[0]

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
            output = self._loss(self.logits(micro_batch), micro_batch.loss, loss_function, settings, guard)
            # the weights already divide by the whole step, and FSDP averages over ranks
            (output.loss * self.world_size).backward()
            metrics.add(output.token_metrics, micro_batch.loss)
        if number != passes:
            raise ValueError(
                f"{number} micro-batches came and {passes} were announced: the gradient was never reduced over ranks"
            )
        _raise_on_every_rank(guard, self.device)
        norm = self._clip_gradient()
        lr = self._next_learning_rate()
        self.optimizer.step()
        return metrics.reduce() | {"grad_norm": norm, "lr": lr}

    def _loss(self, logits, batch, loss_function, settings, guard) -> LossOutput:
        if not self.recompute_loss:
            return loss_function(batch, logits, settings, guard)
        # the second run repeats what the first has reported
        guards = itertools.chain([guard], itertools.repeat(FiniteGuard()))
        return checkpoint(lambda scores: loss_function(batch, scores, settings, next(guards)), logits, use_reentrant=False)

    def _next_learning_rate(self) -> float:
        self.steps += 1
        lr = self.settings.lr * min(1.0, self.steps / max(self.settings.lr_warmup_iters, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _clip_gradient(self) -> float:
        limit = self.settings.clip_grad if self.settings.clip_grad > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise ValueError(
                f"the gradient norm is {norm}: nothing was updated; lower --lr or look at the last metrics for what diverged"
            )
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


class _ResponseRows:
    """Lets a model project only chosen rows to the vocabulary, with its own head and whatever follows it (soft caps, scales)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._rows: Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._choose)

    @contextmanager
    def select(self, rows: Tensor) -> Iterator[None]:
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _choose(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._rows is None:
            return inputs
        return (inputs[0].flatten(0, 1)[self._rows][None],)


def load_causal_lm(path: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A Hugging Face directory's causal LM on the CPU; nothing is fetched."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    for name in [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)  # dropout would make two passes over one batch differ
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
    )
    if missing := sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"]))):
        raise ValueError(f"{path}: its weights lack {missing[0]} (of {len(missing)}), which would be random: is it complete?")
    return model


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
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )


def _raise_on_every_rank(guard: FiniteGuard, device: torch.device) -> None:
    """A broken token on one rank stops all of them before the optimizer steps: none may wait for another in vain."""
    error: ValueError | None = None
    try:
        guard.raise_if_tripped()
    except ValueError as found:
        error = found
    tripped = torch.tensor(float(error is not None), device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(tripped, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if tripped > 0:
        raise ValueError("another data-parallel rank found a trained token with a value that is not finite; nothing was updated")
