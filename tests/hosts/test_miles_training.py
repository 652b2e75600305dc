"""An optimizer step of Miles's FSDP actor on real FSDP2 over gloo, from Miles's own samples, against the inner ring."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs
from tests.distributed.launch import launch
from tests.hosts.miles_host import needs_miles, on_the_cpu, run_of
from tests.hosts.test_miles_train_data import ROWS, samples

pytestmark = needs_miles

DP = 2


def tiny_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=64, attn_implementation="eager", use_cache=False,  # a cache hides where samples begin
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def train(run, rewards):
    """In each of two processes: conversion, this rank's shard, the actor's whole ``_train_core``."""
    on_the_cpu()
    from miles.backends.fsdp_utils import actor as fsdp
    from miles.backends.training_utils import log_utils
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils import distributed_utils
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    rank = dist.get_rank()
    # Miles reduces over groups of one as well
    alone = GroupInfo(rank=0, size=1, group=dist.new_group([rank], use_local_synchronization=True))
    world = GroupInfo(rank=rank, size=DP, group=dist.group.WORLD, gloo_group=dist.group.WORLD)
    distributed_utils.GLOO_GROUP = dist.group.WORLD
    set_parallel_state(
        ParallelState(intra_dp=world, intra_dp_cp=world, cp=alone, tp=alone, pp=alone, ep=alone, etp=alone, indep_dp=alone)
    )
    given = samples()
    for sample, reward in zip(given, rewards, strict=True):
        sample.reward = reward
    data = conversion.convert_samples_to_train_data(run, given, {}, None, None)
    shard = conversion.split_train_data_by_dp_raw(run, data, dp_size=DP)[rank]
    rollout_data = received(run, shard)

    actor = object.__new__(fsdp.FSDPTrainRayActor)
    actor.args, actor.ref_model = run, None
    actor.model = tiny_model()
    fully_shard(actor.model)
    actor.optimizer = torch.optim.AdamW(actor.model.parameters(), lr=1e-2)
    actor.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(actor.optimizer, lambda step: 1.0)
    actor.hf_config, actor.prof = actor.model.config, _Profiler()
    actor.precision_policy = fsdp.resolve_precision_policy(actor.hf_config, run)
    logged = {}
    log_utils.tracking.log = lambda args, values, **_: logged.update(values)
    before = [parameter.full_tensor().clone() for parameter in actor.model.parameters()]
    error = None
    try:
        actor._train_core(rollout_id=0, rollout_data=rollout_data)
    except ValueError as found:
        error = str(found)
    after = [parameter.full_tensor().clone() for parameter in actor.model.parameters()]
    gradients = [parameter.grad.full_tensor().clone() for parameter in actor.model.parameters()]
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"error": error, "moved": moved, "gradients": gradients, "logged": logged, "tokens": [s.tokens for s in given]}


def received(run, shard):
    """Miles's reception of a shard, without its object store."""
    from miles.backends.training_utils import data

    class Kept:
        def __enter__(self):
            return self

    from miles.ray.rollout.train_data_conversion import process_rollout_data_shard

    data.process_rollout_data = lambda *_, **__: (process_rollout_data_shard(run, dict(shard)), Kept())
    rollout_data, _ = data.get_rollout_data(run, None)
    return rollout_data


class _Profiler:
    def iterate_train_log_probs(self, steps):
        return steps

    iterate_train_actor = iterate_train_log_probs

    def step(self, rollout_id):
        pass


def step_run(**changes):
    return run_of(
        **{
            "hf_checkpoint": None, "micro_batch_size": 2, "global_batch_size": len(ROWS), "clip_grad": 1e9, "fp16": False,
            "calculate_per_token_loss": False, "grpo_std_normalization": False, "use_rollout_logprobs": True,
            "log_probs_chunk_size": -1, "fsdp_cpu_offload": False, "data_pad_size_multiplier": 4, "ci_test": False,
        } | changes
    )  # fmt: skip


def test_a_step_of_the_fsdp_actor_is_the_inner_rings(tmp_path):
    run = step_run()
    rewards = [float(i % 3) for i in range(len(ROWS))]
    results = launch(train, DP, tmp_path, run, rewards)
    assert [result["error"] for result in results] == [None] * DP and all(result["moved"] for result in results)

    model, config = tiny_model(), ScoreCenteringConfig.from_args(run)
    total = 0.0
    for i, sample in enumerate(samples()):
        n, pair = sample.response_length, rewards[i // 2 * 2 : i // 2 * 2 + 2]
        advantage = rewards[i] - sum(pair) / 2
        logits = model(torch.tensor([sample.tokens])).logits[0, -n - 1 : -1]
        heads = torch.tensor(sample.rollout_topk_token_ids)
        log_p = selected_log_probs(logits, torch.cat([torch.tensor(sample.tokens[-n:])[:, None], heads], dim=1))
        loss, _ = score_centering_loss(
            ScoreCenteringInputs(
                log_p[:, 0], log_p[:, 1:], torch.tensor(sample.rollout_log_probs), torch.tensor(sample.rollout_topk_log_probs),
                heads >= 0, torch.full((n,), advantage), torch.tensor(sample.loss_mask) > 0,
            ),
            **config.estimator_settings,
        )  # fmt: skip
        total = total + loss.mean() / len(ROWS)
    total.backward()
    for parameter, gradient in zip(model.parameters(), results[0]["gradients"], strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
    logged = results[0]["logged"]
    assert logged["train/loss"] == pytest.approx(float(total), rel=1e-5, abs=1e-6)
    assert {"train/sc_train_head_mass", "train/sc_tail_ratio_max", "train/sc_ess", "train/pg_loss"} <= set(logged)


def test_observing_leaves_another_loss_to_the_bit(tmp_path):
    """The policy loss with and without the drift metrics beside it; both runs carry the candidates."""
    changes = {"loss_type": "policy_loss"}
    rewards = [float(i % 3) for i in range(len(ROWS))]
    plain, watched = (
        launch(train, DP, _folder(tmp_path, name), step_run(score_centering_observe=name == "watched", **changes), rewards)[0]
        for name in ("plain", "watched")
    )
    assert all(torch.equal(a, b) for a, b in zip(plain["gradients"], watched["gradients"], strict=True))
    assert "train/sc_ess" in watched["logged"] and "train/sc_ess" not in plain["logged"]
    assert {name: watched["logged"][name] for name in plain["logged"]} == plain["logged"]


def _folder(path, name):
    (path / name).mkdir()
    return path / name


def test_a_broken_token_stops_the_step_before_the_optimizer(tmp_path):
    rewards = [0.0] * len(ROWS)
    rewards[0] = float("nan")  # its group's advantages are too
    results = launch(train, DP, tmp_path, step_run(), rewards)
    assert not any(result["moved"] for result in results if result["error"])
    told = [result["error"] for result in results if result["error"]]
    assert told and all("advantages" in error and "sample" in error and "Nothing was updated" in error for error in told)
