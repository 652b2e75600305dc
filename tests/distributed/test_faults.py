"""What goes wrong on one rank is said on every rank, and changes no parameter; and what a step allocates."""

import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sc import ScoreCenteringConfig
from miles_sc.backends.fsdp import FsdpBackend
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.data.sharding import shard
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.hub import loss_function
from miles_sc.parallel.context import ContextLayout
from miles_sc.parallel.groups import rank_in, size_of
from tests.distributed.launch import launch
from tests.distributed.rollouts import train_data
from tests.distributed.test_backends import tiny_model

K = 4
LAYOUTS = {"fsdp": (1, ContextLayout()), "tensor": (2, ContextLayout()), "context": (1, ContextLayout("thd", False, 2))}
FAULTS = ["NaN", "too few", "too many", "none came"]


def build(name, model):
    if name == "fsdp":
        return FsdpBackend(model, optimizer=OptimizerSettings(lr=0.1))
    from miles_sc.backends.megatron import MegatronBackend

    tensor_size, layout = LAYOUTS[name]
    return MegatronBackend(model, layout=layout, tensor_size=tensor_size, optimizer=OptimizerSettings(lr=0.1))


def step_of(backend, name, *, fault="", **settings):
    """One optimizer step over six samples of which the last may be broken; what it said, or its metrics."""
    layout = LAYOUTS[name][1]
    data = train_data(vocab_size=backend.vocab_size, k=K, lengths=((3, 4), (2, 7), (5, 2), (1, 6), (4, 4), (2, 5)))
    if fault == "NaN":
        data["rollout_topk_log_probs"][-1] = np.full((5, K), np.nan, np.float32)
        data["loss_masks"][-1] = np.ones(5, np.uint8)
    size = size_of(backend.groups.data)
    mine = shard(data, world_size=size, global_batch_size=6, per_token=True, layout=layout)[rank_in(backend.groups.data)]
    (step,) = mine.steps
    announced = len(step) + {"too few": 1, "too many": -1}.get(fault, 0)
    step = [] if fault == "none came" else step
    rank = rank_in(backend.groups.context)
    micro_batches = [build_micro_batch(mine.data, m, backend.device, pad_token_id=0, layout=layout, rank=rank) for m in step]
    settings = LossSettings(
        score_centering=ScoreCenteringConfig(top_logprobs_num=K),
        vocab_size=backend.vocab_size,
        tensor_parallel_group=backend.groups.tensor,
        **settings,
    )
    try:
        return backend.train_step(micro_batches, announced, loss_function("score_centering"), settings)
    except ValueError as error:
        return str(error)


class Allocations(TorchDispatchMode):
    """Storages of the logits' size ``[T, V]`` (no other tensor is that wide), kept alive so that each is counted once."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.found = columns, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            # more rows than scoring's chunk of two, fewer than the 32 of a transposed weight
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == self.columns:
                if 2 < tensor.numel() // self.columns < 32:
                    self.found.setdefault(tensor.untyped_storage().data_ptr(), (str(function), tensor.untyped_storage()))
        return result


def work(model, folder):
    results = {}
    for name in LAYOUTS:
        backend = build(name, model)
        before = backend.export_weights()
        results[name] = {"said": {fault: step_of(backend, name, fault=fault) for fault in FAULTS}}
        after = backend.export_weights()
        results[name]["unchanged"] = all(torch.equal(before[key], after[key]) for key in before)
        columns = backend.vocab_size if name == "fsdp" else backend._gpt.output_layer.weight.shape[0]
        for inplace in (False, True):
            with Allocations(columns) as seen:
                step_of(backend, name, inplace_backward=inplace, log_probs_chunk_size=2)
            results[name]["allocations", inplace] = [function for function, _ in seen.found.values()]
        moved = backend.export_weights()
        results[name]["moved"] = any(not torch.equal(after[key], moved[key]) for key in after)
        if name == "tensor":
            results["saved"] = refused(backend.save, folder / "file" / "checkpoint")
    return results


def refused(call, path):
    path.parent.touch()  # a file where a folder is wanted
    try:
        call(path)
    except OSError as error:
        return str(error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    return launch(work, 2, folder, tiny_model(folder / "model", "qwen2"), folder)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("NaN", r"rollout_head_log_probs at row .*\(sample 105, response token .*Nothing was updated|another rank found"),
        ("too few", r"\d micro-batches came and \d were announced"),
        ("too many", r"more than \d micro-batches came and \d were announced"),
        ("none came", r"0 micro-batches came and \d were announced"),
    ],
)
def test_a_broken_step_is_refused_on_every_rank(ranks, name, fault, message):

    said = [rank[name]["said"][fault] for rank in ranks]
    assert all(isinstance(text, str) and re.search(message, text) for text in said), said
    if fault == "NaN":
        assert any("sample 105" in text for text in said)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_refused_step_changes_no_parameter_and_the_next_one_does(ranks, name):
    assert ranks[0][name]["unchanged"] and ranks[0][name]["moved"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_place_a_step_holds_one_tensor_of_the_logits_size(ranks, name):
    """The logits of each micro-batch, and nothing beside them: neither a copy on the way nor a gradient."""
    counted = 0
    for rank in ranks:
        in_place, beside = (rank[name]["allocations", inplace] for inplace in (True, False))
        logits = sum("mm" in function or "linear" in function for function in in_place)
        assert len(in_place) == logits, in_place
        assert len(beside) == 2 * logits
        counted += logits
    assert counted >= 5  # a rank may hold too few rows to tell them from scoring's chunk


def test_a_checkpoint_that_one_rank_cannot_write_is_refused_on_every_rank(ranks):
    assert all("cannot be written" in rank["saved"] or "could not write it" in rank["saved"] for rank in ranks)
