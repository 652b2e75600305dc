"""Slime from its samples to its optimizer's step: manager and shards over Ray, one training step against the inner ring."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.distributed.launch import launch
from tests.hosts.inner_ring import inner_ring
from tests.hosts.slime_host import needs_slime, on_the_cpu, run_of
from tests.hosts.step_data import PAD_MULTIPLIER, PADDED, RESPONSE, TOTAL, VOCAB, logits_of, rollout_data
from tests.samples import answer

pytestmark = needs_slime

KEYS = [
    "tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "advantages", "rollout_log_probs",
    "ref_log_probs", "rollout_mask_sums",
]  # fmt: skip


# --- the manager


def samples_of(run, count=4):
    """A rollout as Slime's own functions leave it, with an observation in each."""
    from slime.utils.types import Sample

    samples = []
    for index in range(count):
        sample = Sample(index=index, group_index=index // 2, prompt="p", tokens=[3, 1, 4], reward=float(index % 2))
        meta = answer(2 + index, seed=index)
        values, ids, _ = zip(*meta["output_token_logprobs"], strict=True)
        sample.append_response_tokens(run, tokens=ids, log_probs=values, meta_info=meta, text="r")
        sample.append_response_tokens(run, tokens=[5], trainable=False)
        samples.append(sample)
    return samples


@pytest.fixture(scope="module")
def generated(tmp_path_factory, ray_cluster):
    """``generated(samples, **changes) -> shards``: a rollout through the real manager, an actor of Ray that reads a dump."""
    import ray
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.ray.placement_group import create_rollout_manager

    def generate(samples, **changes):
        path = f"{tmp_path_factory.mktemp('dump')}/{{rollout_id}}.pt"
        save_debug_rollout_data(path, samples, rollout_id=0, evaluation=False)
        run = run_of(
            debug_train_only=True, load_debug_rollout_data=path, load_debug_rollout_data_subsample=None, prompt_data=None,
            use_wandb=False, use_tensorboard=False, **changes,
        )  # fmt: skip
        manager, _ = create_rollout_manager(run, None)
        layout = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        ray.get(manager.set_train_parallel_config.remote(layout))
        shards = ray.get(manager.generate.remote(0))
        ray.kill(manager)
        return run, shards

    return generate


def test_every_rank_receives_the_rows_of_its_samples(generated):
    from slime.utils.data import process_rollout_data

    samples = samples_of(run_of())
    run, shards = generated(samples)
    seen = []
    for rank in range(2):
        data = process_rollout_data(run, shards, rank, 2)
        seen += data["sample_indices"]
        for place, index in enumerate(data["sample_indices"]):
            sample = samples[index]
            assert data["tokens"][place].tolist() == sample.tokens
            assert data["rollout_topk_token_ids"][place].tolist() == sample.rollout_topk_token_ids.tolist()
            assert data["rollout_topk_log_probs"][place].tolist() == sample.rollout_topk_log_probs.tolist()
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_rollouts_metrics_tell_of_its_heads():
    from slime.observability.rollout_metrics import compute_metrics_from_samples

    run = run_of()
    assert {"topk_head_mass", "topk_head_mass_min", "topk_sampled_in_head"} <= set(
        compute_metrics_from_samples(run, samples_of(run))
    )


def test_a_sample_without_candidates_stops_the_rollout(generated):
    """As those of Slime's agent adapters, or of a generate function that never asked."""
    samples = samples_of(run_of())
    samples[2].rollout_topk_token_ids = samples[2].rollout_topk_log_probs = None
    with pytest.raises(ValueError, match="sample 2: no recorded candidates"):
        generated(samples)


def test_data_without_candidates_is_not_trained_on(generated):
    from slime.utils.data import process_rollout_data

    _, shards = generated(samples_of(run_of(rollout_top_logprobs_num=0)), rollout_top_logprobs_num=0, loss_type="policy_loss")
    assert "rollout_topk_log_probs" not in process_rollout_data(run_of(loss_type="policy_loss"), shards, 0, 2)
    with pytest.raises(ValueError, match="rollout data came to .* without rollout_topk_log_probs"):
        process_rollout_data(run_of(), shards, 0, 2)


# --- the loss


def one_rank(run, tensor_size, context_size):
    """In each process: Slime's groups, iterator, batch and loss; the loss, where its gradient went, and the step's metrics."""
    on_the_cpu()
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_with_cp
    from slime.backends.megatron_utils.data import DataIterator, get_batch
    from slime.backends.megatron_utils.loss import loss_function
    from slime.observability.train_metric_utils import reduce_train_step_metrics

    mpu.initialize_model_parallel(tensor_model_parallel_size=tensor_size, context_parallel_size=context_size)
    iterator = DataIterator(local_data(), [[0, 1], [2, 3]])
    tables = [torch.tensor(table) for table in logits_of()]
    joined, width = torch.cat([torch.zeros(1, PADDED), *tables]), PADDED // tensor_size
    columns = slice(mpu.get_tensor_model_parallel_rank() * width, (mpu.get_tensor_model_parallel_rank() + 1) * width)
    places = [torch.arange(len(table)) + 1 + sum(TOTAL[:i]) for i, table in enumerate(tables)]
    gradients, losses, logs = [torch.zeros(total, PADDED) for total in TOTAL], [], []
    for first in (0, 2):
        batch = get_batch(iterator, KEYS, PAD_MULTIPLIER, run.allgather_cp)
        local = local_places(run, batch, places[first : first + 2], slice_with_cp)
        logits = joined[local][..., columns].clone().requires_grad_()
        loss, _, log = loss_function(run, batch, 1, 4, logits)
        loss.backward()
        losses.append(loss.detach())
        logs.append(log)
        spread = torch.zeros(len(joined), PADDED)
        spread[:, columns].index_add_(0, local.flatten(), logits.grad.flatten(0, 1))
        for i, gradient in enumerate(gradients):
            gradient += spread[places[i]]
    reduced = reduce_train_step_metrics(
        logs, calculate_per_token_loss=run.calculate_per_token_loss, step_global_batch_size=4, cp_size=context_size,
        dp_with_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )  # fmt: skip
    return sum(losses), gradients, reduced


def local_data():
    """As Slime's trainer holds it: lists of tensors, the per-token ones sliced by its own context parallelism."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    held = rollout_data()
    held["tokens"] = [torch.tensor(tokens) for tokens in held["tokens"]]
    held["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in held["loss_masks"]]
    for key in ("rollout_log_probs", "ref_log_probs", "advantages"):
        whole = [torch.tensor(values, dtype=torch.float32) for values in held[key]]
        held[key] = [slice_log_prob_with_cp(values, TOTAL[i], RESPONSE[i]) for i, values in enumerate(whole)]
    held["rollout_mask_sums"] = torch.stack([mask.sum() for mask in held["loss_masks"]]).float()
    return held


def local_places(run, batch, places, slice_with_cp):
    """A per-token list through the very slicing that Slime gives its tokens; padding reads row 0."""
    from megatron.core import mpu

    size, length = mpu.get_context_parallel_world_size(), batch["tokens"].shape[1]
    if run.allgather_cp:
        joined = torch.cat(places)
        joined = torch.nn.functional.pad(joined, (0, length * size - len(joined)))
        return joined.chunk(size)[mpu.get_context_parallel_rank()][None]
    joined = torch.cat([slice_with_cp(part, 0) for part in places])
    return torch.nn.functional.pad(joined, (0, length - len(joined)))[None]


CASES = [
    (False, 2, 2, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "entropy_coef": 0.01}),
    (True, 1, 3, {"calculate_per_token_loss": False, "score_centering_is": "tis"}),
    (False, 1, 1, {"score_centering_is": "mis", "rollout_temperature": 0.7, "recompute_loss_function": True}),
]


@pytest.mark.parametrize(
    ("allgather_cp", "tensor_size", "context_size", "changes"),
    CASES,
    ids=[f"{'gather' if g else 'zigzag'}-tp{t}cp{c}-{'-'.join(map(str, o)) or 'plain'}" for g, t, c, o in CASES],
)
def test_a_step_of_slime_is_the_inner_rings(tmp_path, allgather_cp, tensor_size, context_size, changes):
    run = run_of(**{"allgather_cp": allgather_cp, "calculate_per_token_loss": True, "vocab_size": VOCAB} | changes)
    loss, gradients, metrics = inner_ring(run, rollout_data(), logits_of())
    results = launch(one_rank, tensor_size * context_size, tmp_path, run, tensor_size, context_size)

    # Slime scales for Megatron, which averages over the context-parallel ranks, and over four rollouts where asked to
    scale = context_size / (1 if run.calculate_per_token_loss else 4)
    shares = [results[c * tensor_size][0] for c in range(context_size)]
    torch.testing.assert_close(sum(shares).double(), loss * scale, rtol=1e-6, atol=1e-6)
    for i, expected in enumerate(gradients):
        whole = sum(result[1][i] for result in results)
        torch.testing.assert_close(whole, expected * scale, rtol=1e-5, atol=1e-6)
        assert not whole[:, VOCAB:].any()

    logged = results[0][2]
    count = sum(RESPONSE) - 2 if run.calculate_per_token_loss else len(RESPONSE)
    assert logged["loss"] == pytest.approx(float(loss) / count, rel=1e-5)
    masks = [torch.tensor(mask) > 0 for mask in rollout_data()["loss_masks"]]
    masses = torch.cat([own["sc_train_head_mass"][mask] for own, mask in zip(metrics, masks, strict=True)])
    assert logged["sc_train_head_mass_min"] == pytest.approx(float(masses.min()), rel=1e-5)
    assert all(result[2] == pytest.approx(logged, rel=1e-5) for result in results)


# --- the optimizer's step


class MegatronsFork:
    """Stands in for ``megatron.training``, which only Slime's own image has; what of it a step calls is set by the test."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls, is_package=True) if name.split(".")[:2] == ["megatron", "training"] else None

    @staticmethod
    def create_module(spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock(name=name)
        return module

    @staticmethod
    def exec_module(module):
        pass


class Tables(torch.nn.Module):
    """A model whose logits are its parameters, two samples a micro-batch."""

    def __init__(self, tables):
        super().__init__()
        self.tables, self.calls = torch.nn.ParameterList([torch.tensor(table) for table in tables]), 0

    def forward(self, input_ids, **_):
        first, self.calls = 2 * self.calls, self.calls + 1
        logits = torch.cat([*self.tables[first : first + 2]])
        return torch.nn.functional.pad(logits, (0, 0, 0, input_ids.shape[1] - len(logits)))[None]

    def zero_grad_buffer(self):
        pass


def one_step(run, broken):
    """Slime's ``train_one_step`` and its logging: what it reports, the gradient, whether the optimizer stepped, the error."""
    on_the_cpu()
    sys.meta_path.append(MegatronsFork)
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import schedules
    from slime.backends.megatron_utils import model as slime_model
    from slime.backends.megatron_utils.data import DataIterator
    from slime.observability.train_metric_utils import log_rollout_data

    mpu.initialize_model_parallel()
    schedules.forward_backward_no_pipelining = forward_backward
    slime_model.get_args = lambda: run
    data = local_data() | {"global_batch_sizes": [4], "micro_batch_indices": [[0, 1], [2, 3]], "num_microbatches": [2]}
    data["log_probs"] = data["rollout_log_probs"]
    log_rollout_data(0, run, data)
    tables, stepped = logits_of(), []
    if broken:
        tables[2][TOTAL[2] - 2, 3] = float("nan")
    model = Tables(tables)
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: stepped.append(True) or (True, 0.0, None))
    iterator = DataIterator(data, data["micro_batch_indices"])
    try:
        reported, _ = slime_model.train_one_step(
            run, 0, 0, [iterator], [model], optimizer, SimpleNamespace(step=lambda increment: None), 2, 4
        )
    except ValueError as error:
        return {}, [], stepped, str(error)
    return reported, [table.grad for table in model.tables], stepped, ""


def forward_backward(*, forward_step_func, data_iterator, model, num_microbatches, **_):
    """Megatron's schedule without pipeline, which makes its counters on CUDA: each micro-batch forward and backward."""
    logs = []
    for _ in range(num_microbatches):
        logits, loss_of = forward_step_func(data_iterator[0], model[0])
        loss, _, log = loss_of(logits)
        loss.backward()
        logs.append(log)
    return logs


def step_run(**changes):
    megatrons = {
        "custom_megatron_before_train_step_hook_path": None, "enable_mtp_training": False, "seq_length": 16,
        "micro_batch_size": 1, "decoder_seq_length": None, "data_pad_size_multiplier": PAD_MULTIPLIER,
        "save_debug_train_data": None, "use_wandb": False, "use_tensorboard": False, "vocab_size": VOCAB,
        "calculate_per_token_loss": True,
    }  # fmt: skip
    return run_of(**megatrons | changes)


def test_slimes_own_step_trains_the_loss(tmp_path):
    run = step_run()
    reported, gradients, stepped, error = launch(one_step, 1, tmp_path, run, False)[0]
    loss, expected, _ = inner_ring(run, rollout_data(), logits_of())
    assert (error, stepped) == ("", [True])
    assert reported["loss"] == pytest.approx(float(loss) / (sum(RESPONSE) - 2), rel=1e-6)
    assert {"sc_train_head_mass", "sc_train_head_mass_min", "sc_tail_ratio"} <= set(reported)
    for gradient, whole in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-6)


def test_a_broken_token_stops_slime_before_its_step(tmp_path):
    _, _, stepped, error = launch(one_step, 1, tmp_path, step_run(), True)[0]
    assert not stepped
    assert "sample 9, response token 8" in error


def test_observing_leaves_slimes_own_loss_as_it_is(tmp_path):
    own = {"loss_type": "policy_loss", "use_rollout_logprobs": False}
    results = []
    for name, observe in (("plain", False), ("observed", True)):
        (tmp_path / name).mkdir()
        run = step_run(**own, score_centering_observe=observe)
        results += launch(one_step, 1, tmp_path / name, run, False)
    (plain, gradients, _, _), (observed, same, _, _) = results
    assert {name: observed[name] for name in plain} == plain
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    assert {name for name in observed if name.startswith("sc_")} and not [name for name in plain if name.startswith("sc_")]
