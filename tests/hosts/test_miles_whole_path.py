"""The whole path in one piece: a real SGLang, Miles's rollout, conversion and shards over Ray, and a step on eight trainers.

Data 2 x tensor 2 x context 2 in every layout, as Ray actors on gloo; held against the inner ring on the same samples.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist

from tests.hosts import miles_rollout
from tests.hosts.inner_ring import inner_ring
from tests.hosts.miles_host import RECIPE, needs_miles, on_the_cpu
from tests.hosts.miles_rollout import agentic, fresh_sample, generate, in_miles, merged_turns, rollout_run, session_server
from tests.hosts.miles_step import set_parallel_groups, step

pytestmark = needs_miles

SAMPLES, DATA, TENSOR, CONTEXT = 8, 2, 2, 2
LAYOUTS = [("thd", False), ("thd", True), ("bshd", False), ("bshd", True)]
PATHS = ["native", "legacy", "merged", "session v1", "session v2", "filtered"]


def logits_of(index, total, vocab_size):
    """float32 ``[total, padded vocabulary]`` of one sample, the same in every process; padded columns must not count."""
    padded = -(-vocab_size // 16) * 16 + 16
    table = np.random.default_rng(index).normal(size=(total, padded)).astype(np.float32)
    table[:, vocab_size:] = 5.0
    return table


class Trainer:
    """One rank, in a worker of Ray: nothing here knows of the plugin, whose start-up hook runs there by itself."""

    def __init__(self, rank, folder):
        on_the_cpu()
        torch.set_num_threads(1)
        from miles.utils import object_store

        object_store._INSTANCE = object_store.RayObjectStore()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=DATA * TENSOR * CONTEXT)
        set_parallel_groups(tensor=TENSOR, context=CONTEXT, data=DATA)

    def train(self, run, shards):
        from miles.backends.training_utils.data import get_rollout_data
        from miles.backends.training_utils.loss import compute_advantages_and_returns

        data, _ = get_rollout_data(run, shards)
        compute_advantages_and_returns(run, data)
        indices = data["sample_indices"]
        loss, gradients, metrics = step(
            run, data, [logits_of(i, n, run.vocab_size) for i, n in zip(indices, data["total_lengths"], strict=True)]
        )
        return loss, dict(zip(indices, gradients, strict=True)), metrics


@pytest.fixture(scope="module")
def trainers(ray_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    actors = [ray.remote(num_cpus=0)(Trainer).remote(rank, folder) for rank in range(DATA * TENSOR * CONTEXT)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module", params=PATHS)
def rollout(request):
    """A run and its eight samples, generated one way."""
    path = request.param
    server = request.getfixturevalue("filtering_engine" if path == "filtered" else "engine")
    run = rollout_run(str(server.model), server.url, *RECIPE, "--use-rollout-logprobs", "--disable-grpo-std-normalization")
    if path == "filtered":  # as if Miles's own SGLang reported supports; the engine of this run does
        run.rollout_top_k, run.rollout_top_p = 4, 0.9
    miles_rollout.ASKED.clear()

    async def one(index):
        if path == "merged":
            return (await merged_turns(run, index=index))[1]
        if path.startswith("session"):
            (sample,) = await agentic(run, index=index, length=8)
            return sample
        return await generate(run, fresh_sample(f"{index} + 4 =", index=index), legacy=path == "legacy", length=4 + index)

    async def all_of_them():
        return [await one(index) for index in range(SAMPLES)]

    with session_server(run, path.split()[1]) if path.startswith("session") else nullcontext():
        samples = in_miles(run, all_of_them)
    for index, sample in enumerate(samples):
        assert sample.index == index
        sample.reward = float(index % 3)
    return run, samples


@pytest.mark.parametrize(("qkv_format", "allgather_cp"), LAYOUTS, ids=[f"{q}-{'gather' if g else 'zigzag'}" for q, g in LAYOUTS])
def test_a_step_is_the_inner_rings(rollout, trainers, object_store, qkv_format, allgather_cp):
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data, split_train_data_by_dp

    run, samples = rollout
    vocab_size = json.loads((Path(run.hf_checkpoint) / "config.json").read_text())["vocab_size"]
    vars(run).update(
        qkv_format=qkv_format, allgather_cp=allgather_cp, vocab_size=vocab_size, calculate_per_token_loss=True,
        enable_witness=False, compress_ratios=None, data_pad_size_multiplier=4,
    )  # fmt: skip
    shards = split_train_data_by_dp(run, convert_samples_to_train_data(run, samples, {}, None, None), {"dp_size": DATA})
    results = ray.get([trainer.train.remote(run, shards) for trainer in trainers], timeout=120)

    tables = [logits_of(sample.index, len(sample.tokens), vocab_size) for sample in samples]
    loss, gradients, metrics = inner_ring(run, whole_data(samples), tables)
    # tensor-parallel ranks have the same loss and their own columns, the others a share of loss and rows
    torch.testing.assert_close(sum(share for share, *_ in results[::TENSOR]).double(), loss, rtol=1e-6, atol=1e-6)
    for index, expected in enumerate(gradients):
        parts = [gradient[index] for _, gradient, _ in results if index in gradient]
        assert len(parts) == TENSOR * CONTEXT
        torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-6)

    trained = [torch.tensor(sample.loss_mask) > 0 for sample in samples]
    masses = torch.cat([own["sc_train_head_mass"][mask] for own, mask in zip(metrics, trained, strict=True)])
    for _, _, logged in results:
        assert logged["loss"] == pytest.approx(float(loss) / len(masses), rel=1e-5, abs=1e-7)
        assert logged["sc_train_head_mass"] == pytest.approx(float(masses.mean()), rel=1e-5)
        assert logged["sc_train_head_mass_min"] == pytest.approx(float(masses.min()), rel=1e-5)


def whole_data(samples):
    """The samples as the inner ring wants them; an advantage is the reward less the mean of the two of its prompt."""
    rewards = [sample.reward for sample in samples]
    means = [sum(rewards[i // 2 * 2 : i // 2 * 2 + 2]) / 2 for i in range(len(samples))]
    return {
        "tokens": [np.array(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [np.array(sample.rollout_log_probs) for sample in samples],
        "rollout_topk_token_ids": [sample.rollout_topk_token_ids for sample in samples],
        "rollout_topk_log_probs": [sample.rollout_topk_log_probs for sample in samples],
        "advantages": [
            np.full(s.response_length, reward - mean) for s, reward, mean in zip(samples, rewards, means, strict=True)
        ],
    }
