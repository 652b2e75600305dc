"""A Hugging Face causal LM under FSDP2 (``fully_shard``): gloo on CPUs, NCCL where CUDA is there."""

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
from miles_sc.backends.optimizer_step import StepLoss, check_exported, check_gradient_norm, clip_limit, exactly, learning_rate
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.response_rows import ResponseRows
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.hub import LossFunction
from miles_sc.parallel.context import ONE_RANK, ContextLayout
from miles_sc.parallel.groups import ParallelGroups, size_of


class FsdpBackend:
    """One data-parallel rank of a policy, see :class:`miles_sc.backends.Backend`. The default process group must exist."""

    def __init__(
        self,
        model_path: str,
        *,
        layout: ContextLayout = ONE_RANK,
        optimizer: OptimizerSettings | None,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        recompute_loss: bool = False,
    ) -> None:
        """Args:
        model_path: a Hugging Face directory.
        layout: ``thd`` packs samples into one row, which not every architecture keeps apart.
        optimizer: None for a model that only scores, a reference.
        bf16: compute in bfloat16; parameters, their gradients' reduction and the optimizer stay float32.
        gradient_checkpointing: recompute activations in backward.
        recompute_loss: rerun the loss in backward instead of keeping what it saved.

        Raises:
            ValueError: a layout that this backend or this model cannot serve.
        """
        if layout.size != 1:
            raise ValueError(f"a context-parallel size of {layout.size}: FSDP is data-parallel; set 1, or use Megatron")
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.groups = ParallelGroups(data=dist.group.WORLD, data_context=dist.group.WORLD)
        self.settings = optimizer
        self.steps = 0
        self.recompute_loss = recompute_loss
        model = load_causal_lm(model_path).to(self.device)
        if layout.packed:
            _refuse_mixed_samples(model)
        self.model = _sharded(model, bf16=bf16, gradient_checkpointing=gradient_checkpointing)
        self._response_rows = ResponseRows(self.model.get_output_embeddings())
        self.optimizer = None if optimizer is None else _build_optimizer(self.model, optimizer)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, all of which the sampler draws from."""
        return self.model.config.vocab_size

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        # positions that begin anew tell the model which samples are packed into one row
        with self._response_rows.select(micro_batch.rows):
            output = self.model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids, use_cache=False)
        return output.logits.squeeze(0)  # not [0], whose backward would copy the gradient

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch, function: ScoreFunction) -> Tensor:
        self.model.eval()
        return function(self._logits(micro_batch), micro_batch.loss)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], num_micro_batches: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Collectives: FSDP's own, one flag, the gradient norm's, two of the metrics."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        step = StepLoss(loss_function, settings, recompute=self.recompute_loss)
        for number, micro_batch in enumerate(exactly(micro_batches, num_micro_batches), start=1):
            self.model.set_requires_gradient_sync(number == num_micro_batches)
            # the weights already divide by the whole step, and FSDP averages over ranks
            (step.of(micro_batch, self._logits(micro_batch)) * size_of(self.groups.data)).backward()
        step.check(self.device)
        norm = self._clip_gradient()
        self.steps += 1
        lr = learning_rate(self.settings, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return step.metrics.reduce(self.groups.data_context) | {"grad_norm": norm, "lr": lr}

    def _clip_gradient(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_limit(self.settings))
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        check_gradient_norm(norm)
        return norm

    def export_weights(self) -> dict[str, Tensor]:
        exported = {}
        for name, value in self.model.state_dict().items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                exported[name] = value.detach().to("cpu", copy=True)
        return check_exported(exported)

    def save(self, directory: Path) -> None:
        try:
            dcp.save(self._state(), checkpoint_id=str(directory))
        except dcp.api.CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(
                f"checkpoint {directory}: rank {rank} cannot write it ({cause}); is the disk full? choose another --save"
            ) from error

    def load(self, directory: Path) -> None:
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


@torch.no_grad()
def _refuse_mixed_samples(model: PreTrainedModel) -> None:
    """Asks the model itself: two samples in one row must score as each does alone.

    Attention tells them apart by their positions; recurrent and convolution layers, and some position embeddings, do not.
    """
    model.eval()
    lengths, limit = (7, 6), min(model.config.vocab_size, 1000)
    ids = torch.arange(sum(lengths), device=model.device)[None] * 37 % limit
    positions = torch.cat([torch.arange(n, device=model.device) for n in lengths])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits.log_softmax(-1)
    alone = [
        model(input_ids=part, position_ids=where, use_cache=False).logits.log_softmax(-1)
        for part, where in zip(ids.split(lengths, dim=1), positions.split(lengths, dim=1), strict=True)
    ]
    difference = float((packed - torch.cat(alone, dim=1)).abs().max())
    if not difference < 1e-3:
        raise ValueError(
            f"--qkv-format thd: {type(model).__name__} lets samples packed into one row see each other (log-probs differ by "
            f"{difference:.2g}); set --qkv-format bshd"
        )


def _sharded(model: PreTrainedModel, *, bf16: bool, gradient_checkpointing: bool) -> PreTrainedModel:
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
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
