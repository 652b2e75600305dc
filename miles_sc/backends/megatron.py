"""A causal LM on Megatron-Core: tensor, context and data parallel; gloo on CPUs, NCCL where CUDA is there."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from transformers import AutoConfig

from miles_sc.backends import ScoreFunction
from miles_sc.backends.megatron_model import build_gpt_model, transformer_config, uses_gathered_attention
from miles_sc.backends.megatron_on_cpu import megatron_on_cpu
from miles_sc.backends.megatron_weights import WeightMap, hugging_face_names
from miles_sc.backends.optimizer_step import check_gradient_norm, learning_rate, micro_batch_loss, raise_on_every_rank
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.response_rows import ResponseRows
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import MicroBatch
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.finite_guard import FiniteGuard
from miles_sc.loss.hub import LossFunction
from miles_sc.loss.metrics import StepMetrics
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import ParallelGroups, rank_in, size_of


class MegatronBackend:
    """One rank of the policy. The default process group must be initialised; every rank must call every method."""

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

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """``[T, V/TP]`` at this rank's response rows; no other row is projected to the vocabulary."""
        if self._gathers:
            how = {"attention_mask": micro_batch.attention_mask()}
        else:
            how = {"attention_mask": None, "packed_seq_params": _packed_sequences(micro_batch)}
        if self._config.bf16:
            how["fp32_output"] = False  # scoring widens a chunk at a time
        with self._response_rows.select(micro_batch.rows):
            return self.model(micro_batch.input_ids, micro_batch.position_ids, **how)[0]

    @torch.no_grad()
    def score(self, micro_batches: Iterable[MicroBatch], function: ScoreFunction) -> list[Tensor]:
        """``function(logits, batch) -> [T]`` of each micro-batch, without graph: log-probs before a step, say."""
        self.model.eval()
        with megatron_on_cpu():
            return [function(self.logits(micro_batch), micro_batch.loss) for micro_batch in micro_batches]

    def train_step(
        self, micro_batches: Iterable[MicroBatch], passes: int, loss_function: LossFunction, settings: LossSettings
    ) -> dict[str, float]:
        """Megatron's forward-backward schedule over the micro-batches of one optimizer step, then the step.

        Collectives: the model's own, one flag, the gradient norm's, two of the metrics.

        Args:
            micro_batches: built as they are needed.
            passes: how many there are; the same on every rank.

        Raises:
            ValueError: a trained token or the gradient norm is not finite; no parameter has changed then.
        """
        self.model.train()
        guard, metrics = FiniteGuard(), StepMetrics()
        # The weights already divide by the whole step. Megatron divides by the passes and the data x context ranks, and
        # multiplies by the context ranks; what is left of that is undone here.
        scale = passes * size_of(self.groups.data)

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            micro_batch = next(iterator)
            guard.watch(micro_batch.describe)

            def loss(logits: Tensor) -> tuple[Tensor, dict]:
                output = micro_batch_loss(logits, micro_batch.loss, loss_function, settings, guard, recompute=self.recompute_loss)
                metrics.add(output.token_metrics, micro_batch.loss)
                return output.loss * scale, {}

            return self.logits(micro_batch), loss

        with megatron_on_cpu():
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=[self.model],
                num_microbatches=passes,
                seq_length=1,  # unused without pipeline parallelism, like the next
                micro_batch_size=1,
            )
            raise_on_every_rank(guard, self.device)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.clip_grad_norm(self.settings.clip_grad if self.settings.clip_grad > 0 else math.inf))
            check_gradient_norm(norm)
            self.steps += 1
            lr = learning_rate(self.settings, self.steps)
            for group in self.optimizer.param_groups:
                # Megatron leaves both to its scheduler; norms and biases have the multiplier 0
                group["lr"], group["weight_decay"] = lr, self.settings.weight_decay * group["wd_mult"]
            self.optimizer.step_with_ready_grads()
        return metrics.reduce(self.groups.rows) | {"grad_norm": norm, "lr": lr}

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
        """Whole float32 parameters on the CPU under Hugging Face names, on rank 0; empty elsewhere."""
        exported = {}
        for name, parameter in self._gpt.named_parameters():
            (value,) = _master(parameter) or (parameter,)
            for target, whole in self._weight_map.gather(name, value.detach()).items():
                if dist.get_rank() == 0:
                    if not whole.isfinite().all():
                        raise ValueError(
                            f"{target} holds NaN or infinity after the last update: the run has diverged; lower --lr"
                        )
                    exported[target] = whole.to("cpu", torch.float32, copy=True)
        if exported and self._gpt.share_embeddings_and_output_weights:
            exported["lm_head.weight"] = exported["model.embed_tokens.weight"]
        return exported

    def save(self, directory: Path) -> None:
        """Writes parameters and optimizer state, a file per tensor-parallel rank; OSError if it cannot be written."""
        if rank_in(self.groups.rows) == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                torch.save(self._state(), directory / self._file_name())
            except (OSError, RuntimeError) as error:
                raise OSError(
                    f"checkpoint {directory} cannot be written ({error}); is the disk full? choose another --save"
                ) from error
        dist.barrier()

    def load(self, directory: Path) -> None:
        """Restores what :meth:`save` wrote, to the bit on the same layout."""
        path = directory / self._file_name()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            with megatron_on_cpu():
                self._gpt.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise ValueError(
                f"checkpoint {path} cannot be read ({type(error).__name__}): damaged, or of another layout? remove it, or "
                "name another --load"
            ) from error
        self.steps = state["steps"]

    def _state(self) -> dict:
        return {"model": self._gpt.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def _file_name(self) -> str:
        return f"tensor_{rank_in(self.groups.tensor)}.pt"


def megatron_groups(tensor_size: int, context_size: int) -> ParallelGroups:
    """Megatron's process groups, made on the first call; a later call must ask for the same sizes."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_size, context_parallel_size=context_size)
    found = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size())
    if found != (tensor_size, context_size):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_size, context_parallel_size=context_size)
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        rows=parallel_state.get_data_parallel_group(with_context_parallel=True),
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
