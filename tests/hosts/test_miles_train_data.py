"""Samples through the real Miles to a trainer's batch: conversion, shards over real Ray, reception, micro-batches."""

import numpy as np
import pytest
import ray
import torch

from miles_sc.hosts.train_data import KEYS
from miles_sc.rollout.response import append_candidates
from tests.hosts.miles_host import needs_miles, on_the_cpu, run_of
from tests.samples import PROMPT, K, answer, support_answer

pytestmark = needs_miles

ROWS = [3, 5, 2, 4, 1, 6, 2, 3]


def samples(*, support=False):
    from miles.utils.types import Sample

    made = []
    for i, rows in enumerate(ROWS):
        sample = Sample(index=i, group_index=i // 2, rollout_id=i, tokens=list(PROMPT), reward=float(i % 2))
        recorded = support_answer(rows, seed=i) if support else answer(rows, seed=i)
        append_candidates(sample, recorded, k=K, mode="support" if support else "selected")
        sample.status = Sample.Status.COMPLETED
        made.append(sample)
    return made


def run_with(**changes):
    return run_of(**{"hf_checkpoint": None, "delay_split_train_data_by_dp": False} | changes)


def convert(run, given):
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data

    return convert_samples_to_train_data(run, given, {}, None, None)


@pytest.mark.parametrize("support", [False, True], ids=["selected", "support"])
@pytest.mark.parametrize("split", ["in the rollout", "in the rollout, scheduled", "in training"])
def test_rows_reach_every_shard_and_batch(object_store, monkeypatch, support, split):
    """Two data-parallel ranks; each micro-batch holds the arrays of its own samples, as they were recorded."""
    from miles.backends.training_utils import log_utils
    from miles.backends.training_utils.data import DataIterator, get_batch, get_rollout_data
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    delayed = split == "in training"
    filtered = {"rollout_top_k": K, "rollout_top_p": 0.9} if support else {}
    run = run_with(delay_split_train_data_by_dp=delayed, **filtered)
    given = samples(support=support)
    data = convert(run, given)
    config = {"dp_size": 2}
    if delayed:
        reference = object_store.put(value=data, value_spec=conversion.ROLLOUT_DATA_VALUE_SPEC)
    else:
        if split.endswith("scheduled"):
            config |= {"cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": None}
            run.global_batch_size = len(ROWS)
        reference = conversion.split_train_data_by_dp(run, data, config)
    seen = []
    for rank in range(2):
        alone = GroupInfo(rank=0, size=1, group=None)
        mine = GroupInfo(rank=rank, size=2, group=None)
        set_parallel_state(
            ParallelState(intra_dp=mine, intra_dp_cp=mine, cp=alone, tp=alone, pp=alone, ep=alone, etp=alone, indep_dp=alone)
        )
        received, _ = get_rollout_data(run, reference if delayed else list(reference))
        received["advantages"] = [torch.full((n,), 1.0) for n in received["response_lengths"]]
        logged = {}
        monkeypatch.setattr(log_utils, "gather_log_data", lambda *a, logged=logged: logged.update(a[3]))
        log_utils.log_rollout_data(0, run, received)
        assert "rewards" in logged and not set(KEYS) & set(logged)
        iterator = DataIterator(received, micro_batch_size=2)
        for _ in range(len(received["tokens"]) // 2):
            batch = get_batch(
                iterator,
                ["tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "advantages"],
                4,
            )
            for place, index in enumerate(batch["sample_indices"]):
                seen.append(index)
                check_entry(batch, place, given[index], support)
    assert sorted(seen) == list(range(len(ROWS)))


def check_entry(batch, place, sample, support):
    np.testing.assert_array_equal(batch["rollout_topk_log_probs"][place], sample.rollout_topk_log_probs)
    ids = (batch.get("rollout_topk_token_ids") or [None] * 9)[place]
    if ids is not None:
        np.testing.assert_array_equal(ids, sample.rollout_topk_token_ids)
    if support:
        # ids in the order of the support need not travel twice
        assert ids is None
        np.testing.assert_array_equal(batch["rollout_sampling_mask_ids"][place], sample.rollout_sampling_mask.ids)
        np.testing.assert_array_equal(batch["rollout_topk_lengths"][place], sample.rollout_sampling_mask.lengths)


def test_ray_carries_the_rows_without_copying(ray_cluster):
    """What a trainer gets lies in shared memory, read-only."""
    data = convert(run_with(), samples())
    received = ray.get(ray.put(data))
    assert not received["rollout_topk_log_probs"][0].flags.writeable


def test_a_forward_only_batch_brings_no_candidates():
    on_the_cpu()
    from miles.backends.training_utils.data import DataIterator

    asked = []

    class Watching(DataIterator):
        def get_next(self, keys):
            asked.append(list(keys))
            raise StopIteration

    from miles.backends.training_utils.data import get_batch
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    alone = GroupInfo(rank=0, size=1, group=None)
    set_parallel_state(ParallelState(*[alone] * 8))
    iterator = Watching({"rollout_topk_log_probs": [], "rollout_topk_token_ids": []}, micro_batch_size=1)
    for keys in (["tokens", "loss_masks"], ["tokens", "loss_masks", "advantages"]):
        with pytest.raises(StopIteration):
            get_batch(iterator, keys)
    assert [set(KEYS) & set(keys) for keys in asked] == [set(), {"rollout_topk_log_probs", "rollout_topk_token_ids"}]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s.__dict__.pop("rollout_topk_token_ids"), "sample 1: candidate token_ids are NoneType"),
        (lambda s: _drop_rows(s), "sample 1: no recorded candidates, and it is to be trained on"),
        (lambda s: setattr(s, "rollout_topk_log_probs", s.rollout_topk_log_probs.astype(np.float64)), "give a numpy float32"),
        (lambda s: setattr(s, "rollout_log_probs", s.rollout_log_probs[:-1]), "rollout_log_probs"),
        (lambda s: setattr(s, "rollout_log_probs", None), "rollout_log_probs are missing"),
        (lambda s: _shift_rows(s), "sample 1"),
    ],
    ids=["one array", "none", "type", "short log-probs", "no log-probs", "shifted"],
)
def test_a_producers_sample_without_its_fields_is_refused(spoil, told):
    given = samples()
    spoil(given[1])
    with pytest.raises(ValueError, match=told):
        convert(run_with(), given)


def _drop_rows(sample):
    del sample.rollout_topk_token_ids, sample.rollout_topk_log_probs


def _shift_rows(sample):
    sample.rollout_topk_token_ids = np.roll(sample.rollout_topk_token_ids, 1, axis=0)
    sample.rollout_topk_log_probs = np.roll(sample.rollout_topk_log_probs, 1, axis=0)


def test_a_removed_sample_may_come_without_rows():
    given = samples()
    _drop_rows(given[2])
    given[2].remove_sample = True
    data = convert(run_with(), given)
    assert (data["rollout_topk_token_ids"][2] == -1).all() and data["rollout_topk_token_ids"][2].shape == (ROWS[2], K)


def test_a_converter_that_drops_samples_is_refused(monkeypatch):
    """It is refused at start-up by its flag; one that slips past is refused here."""
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data

    with pytest.raises(ValueError, match="a converter of your own drops the candidates"):
        convert_samples_to_train_data(run_with(), samples(), {}, lambda args, given: {"tokens": []}, None)


def test_a_converter_that_reorders_samples_is_refused():
    """Beside another loss its flag is no fault; its rows would stand beside the candidates of others."""
    from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data

    run = run_with(loss_type="policy_loss", score_centering_observe=True)
    given = samples()

    def converter(order):
        return lambda args, given: {"tokens": [list(given[i].tokens) for i in order]}

    in_order = list(range(len(given)))
    for sample in given:
        sample.loss_mask = None  # as a converter may leave it
    assert len(convert_samples_to_train_data(run, given, {}, converter(in_order), None)["rollout_topk_token_ids"]) == len(given)
    with pytest.raises(ValueError, match="sample 1: its row of train data holds other tokens"):
        convert_samples_to_train_data(run, given, {}, converter([0, 2, 1, *in_order[3:]]), None)


@pytest.mark.parametrize("place", [0, 3])
def test_a_prompt_that_left_no_room_is_no_fault(place):
    """Miles does not send it, and leaves its sample without log-probs."""
    given = samples()
    given[place].__dict__.update(tokens=list(PROMPT), response_length=0, loss_mask=[], rollout_log_probs=None)
    _drop_rows(given[place])
    data = convert(run_with(), given)
    assert data["rollout_log_probs"][place] == [] and len(data["rollout_topk_token_ids"][place]) == 0
    assert len(data["rollout_log_probs"]) == len(given)


def test_a_shard_without_candidates_stops_the_trainer(object_store, monkeypatch):
    """The converting process ran without us: on a node without the package, say."""
    from miles.backends.training_utils.data import get_rollout_data
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    run = run_with()
    data = {key: value for key, value in convert(run, samples()).items() if key not in KEYS}
    reference = conversion.split_train_data_by_dp(run, data, {"dp_size": 1})
    set_parallel_state(ParallelState(*[GroupInfo(rank=0, size=1, group=None)] * 8))
    with pytest.raises(ValueError, match="without rollout_topk_log_probs: .* ran without miles_sc. .*Nothing was trained"):
        get_rollout_data(run, reference)


def test_a_rollouts_metrics_tell_of_its_heads():
    """Beside Miles's own numbers, under ``rollout/``; of a rollout that recorded nothing there is nothing to tell."""
    from miles.ray.rollout.metrics import _compute_metrics_from_samples

    given = samples()
    told = _compute_metrics_from_samples(run_with(), given)
    masses = np.concatenate([np.exp(sample.rollout_topk_log_probs).sum(axis=1) for sample in given])
    assert told["topk_head_mass"] == pytest.approx(masses.mean()) and told["topk_head_mass_min"] == pytest.approx(masses.min())
    hits = [
        token in row for s in given for token, row in zip(s.tokens[-len(s.loss_mask) :], s.rollout_topk_token_ids, strict=True)
    ]
    assert told["topk_sampled_in_head"] == pytest.approx(np.mean(hits))
    for sample in given:
        _drop_rows(sample)
    plain = _compute_metrics_from_samples(run_with(), given)
    assert plain == {name: value for name, value in told.items() if not name.startswith("topk_")}
