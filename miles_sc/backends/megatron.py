"""A causal LM on Megatron-Core: tensor, context and data parallel; gloo on CPUs, NCCL where CUDA is there."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import AutoConfig

from miles_sc.backends import ScoreFunction
from miles_sc.backends.megatron_model import build_gpt_model, transformer_config, uses_gathered_attention
from miles_sc.backends.megatron_on_cpu import megatron_on_cpu
from miles_sc.backends.megatron_weights import WeightMap, hugging_face_names
from miles_sc.backends.optimizer_step import (
    StepLoss,
    check_exported,
    check_gradient_norm,
    clip_limit,
    exactly,
    learning_rate,
    raise_on_every_rank,
)
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.response_rows import ResponseRows
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.hub import LossFunction
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import ParallelGroups, rank_in, size_of


class MegatronBackend:
    """One rank of a policy, see :class:`miles_sc.backends.Backend`. The default process group must exist."""

    def __init__(
        self,
        model_path: str,
        *,
        layout: ContextLayout,
        tensor_size: int,
        optimizer: OptimizerSettings | None,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        recompute_loss: bool = False,
    ) -> None:
        """Args:
        model_path: a Hugging Face directory of a llama, qwen2 or qwen3 model.
        layout: how micro-batches lie over the context-parallel group.
        tensor_size: ranks that share one vocabulary, one set of heads.
        optimizer: None for a model that only scores, a reference.
        bf16: compute in bfloat16; gradients are reduced, and master weights kept, in float32.
        gradient_checkpointing: recompute activations in backward.
        recompute_loss: rerun the loss in backward instead of keeping what it saved.
        """
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.groups = megatron_groups(tensor_size, layout.size)
        self.settings, self.steps, self.recompute_loss = optimizer, 0, recompute_loss
        model_config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        self.vocab_size: int = model_config.vocab_size
        self._weight_map = WeightMap(model_config, self.groups.tensor)
        self._gathers = uses_gathered_attention(layout)
        self._config = transformer_config(
            model_config, tensor_size=tensor_size, layout=layout, bf16=bf16, gradient_checkpointing=gradient_checkpointing
        )
        with megatron_on_cpu():
            gpt = build_gpt_model(model_config, self._config, layout)
            self._response_rows = ResponseRows(gpt.output_layer, batch_first=False)
            self.model = Float16Module(self._config, gpt) if bf16 else gpt
            self._gpt = gpt
            self.optimizer = None if optimizer is None else self._build_optimizer(optimizer, bf16=bf16)
        self._load_weights(model_path)

    def _build_optimizer(self, settings: OptimizerSettings, *, bf16: bool) -> MegatronOptimizer:
        self.model = DistributedDataParallel(self._config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.model)
        self._config.no_sync_func = self.model.no_sync
        self._config.finalize_model_grads_func = finalize_model_grads
        config = OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            sgd_momentum=0.0,
            clip_grad=settings.clip_grad,
            bf16=bf16,
            params_dtype=self._config.params_dtype,
        )
        return get_megatron_optimizer(config, [self.model])

    def _logits(self, micro_batch: MicroBatch) -> Tensor:
        if self._gathers:
            how = {"attention_mask": micro_batch.attention_mask()}
        else:
            how = {"attention_mask": None, "packed_seq_params": _packed_sequences(micro_batch)}
        if self._config.bf16:
            how["fp32_output"] = False  # scoring widens a chunk at a time
        with self._response_rows.select(micro_batch.rows):
            logits = self.model(micro_batch.input_ids, micro_batch.position_ids, **how)
        return logits.squeeze(0)  # not [0], whose backward would copy the gradient

    @torch.no_grad()
    def score(self, micro_batch: MicroBatch, function: ScoreFunction) -> Tensor:
        self.model.eval()
        with megatron_on_cpu():
            return function(self._logits(micro_batch), micro_batch.loss)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], num_micro_batches: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Megatron's forward-backward schedule. Collectives: the model's, a flag, the gradient norm's, two of the metrics."""
        self.model.train()
        step = StepLoss(loss_function, settings, recompute=self.recompute_loss)
        # The weights already divide by the whole step. Megatron divides by the micro-batches and the data x context ranks, and
        # multiplies by the context ranks; what is left of that is undone here.
        scale = num_micro_batches * size_of(self.groups.data)

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            micro_batch = next(iterator)
            return self._logits(micro_batch), lambda logits: (step.of(micro_batch, logits) * scale, {})

        coming = exactly(micro_batches, num_micro_batches)
        with megatron_on_cpu():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=coming,
                model=[self.model],
                num_microbatches=num_micro_batches,
                seq_length=1,  # unused without pipeline parallelism, like the next
                micro_batch_size=1,
            )
            next(coming, None)  # refuses more than were announced
            step.check(self.device)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.clip_grad_norm(clip_limit(self.settings)))
            check_gradient_norm(norm)
            self.steps += 1
            lr = learning_rate(self.settings, self.steps)
            for group in self.optimizer.param_groups:
                # Megatron leaves both to its scheduler; norms and biases have the multiplier 0
                group["lr"], group["weight_decay"] = lr, self.settings.weight_decay * group["wd_mult"]
            self.optimizer.step_with_ready_grads()
        return step.metrics.reduce(self.groups.data_context) | {"grad_norm": norm, "lr": lr}

    def _load_weights(self, path: str) -> None:
        weights = load_causal_lm(path).state_dict()
        used = set()
        with torch.no_grad():
            for name, parameter in self._gpt.named_parameters():
                shard = self._weight_map.shard(name, weights)
                for copy in (parameter, *_master(parameter)):
                    copy.copy_(shard)
                used.update(hugging_face_names(name))
        if self._gpt.share_embeddings_and_output_weights:
            used.add("lm_head.weight")
        if unused := sorted(set(weights) - used):
            raise ValueError(f"{path}: {unused[0]} (of {len(unused)}) has no place in Megatron's model; use --train-backend fsdp")

    def export_weights(self) -> dict[str, Tensor]:
        """A gather over the tensor-parallel group for each sharded parameter."""
        exported = {}
        for name, parameter in self._gpt.named_parameters():
            (value,) = _master(parameter) or (parameter,)
            whole = self._weight_map.gather(name, value.detach())
            if dist.get_rank() == 0:
                exported |= {target: weight.to("cpu", torch.float32, copy=True) for target, weight in whole.items()}
        if exported and self._gpt.share_embeddings_and_output_weights:
            exported["lm_head.weight"] = exported["model.embed_tokens.weight"]
        return check_exported(exported)

    def save(self, directory: Path) -> None:
        """A file per tensor-parallel rank."""
        error: OSError | None = None
        if rank_in(self.groups.data_context) == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                torch.save(self._state(), directory / self._file_name())
            except (OSError, RuntimeError) as cause:  # torch's writer says RuntimeError
                error = OSError(f"checkpoint {directory} cannot be written ({cause}); is the disk full? choose another --save")
        raise_on_every_rank(
            error, self.device, OSError(f"checkpoint {directory}: another rank cannot write it; is the disk full?")
        )

    def load(self, directory: Path) -> None:
        path = directory / self._file_name()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise ValueError(
                f"checkpoint {path} cannot be read ({type(error).__name__}): damaged, or of another layout? remove it, or name "
                "another --load"
            ) from error
        try:
            with megatron_on_cpu():
                self._gpt.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
            self.steps = int(state["steps"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"checkpoint {path} is of another model ({error}): name another --load") from error

    def _state(self) -> dict:
        return {"model": self._gpt.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def _file_name(self) -> str:
        return f"tensor_{rank_in(self.groups.tensor)}.pt"


def megatron_groups(tensor_size: int, context_size: int) -> ParallelGroups:
    """Megatron's process groups of these sizes: those that are there, or new ones. A backend of other sizes is dead then."""
    sizes = (tensor_size, context_size)
    if parallel_state.model_parallel_is_initialized():
        found = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size())
        if found != sizes:
            parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_size, context_parallel_size=context_size)
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(0)  # initial weights are drawn before the checkpoint's replace them
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        data_context=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _master(parameter: torch.nn.Parameter) -> tuple[Tensor, ...]:
    """The float32 copy of a bfloat16 parameter that the optimizer works on, if there is one."""
    master = getattr(parameter, "main_param", None)
    return () if master is None else (master,)


def _packed_sequences(micro_batch: MicroBatch) -> PackedSeqParams | None:
    """What Transformer Engine's attention needs to know of samples packed into one row; padded rows need nothing."""
    if not micro_batch.layout.packed:
        return None
    lengths = [micro_batch.layout.padded(int(n)) for n in micro_batch.maps[0].total_lengths] or [micro_batch.layout.padded(1)]
    ends = torch.tensor([0, *lengths], device=micro_batch.input_ids.device).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
