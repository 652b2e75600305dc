"""What a host's optimizer step leaves behind, and what the next one must not find."""

from types import SimpleNamespace

import pytest
import torch

from miles_sc.hosts.loss import STEP, forward_backward
from miles_sc.hosts.miles_training import train_core
from miles_sc.loss.batch import LossBatch


def micro_batch(value):
    """One trained token with a metric."""
    ones = torch.ones(1)
    batch = LossBatch(torch.zeros(1, 1, dtype=torch.long), ones, ones.bool(), ones, ones)
    STEP.add({"sc_train_head_mass": torch.tensor([value])}, batch)


def on_megatron(work):
    """``work`` as the forwards and backwards of one step."""
    forward_backward(lambda: work, None, (), {})()


def on_fsdp(work):
    """``work`` before the step of a real optimizer."""
    actor = SimpleNamespace(optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    train_core(lambda: (work(), actor.optimizer.step()), actor, (), {})


TRAINERS = pytest.mark.parametrize("train", [on_megatron, on_fsdp])


@TRAINERS
def test_a_step_that_was_given_up_leaves_nothing(train):
    """A host may retry a step whose metrics it could not reduce."""
    train(lambda: micro_batch(0.2))
    train(lambda: micro_batch(0.8))
    assert STEP.take_metrics(None)["sc_train_head_mass"] == pytest.approx(0.8)


@TRAINERS
def test_a_broken_token_of_a_step_that_was_given_up_is_forgotten(train):
    def broken():
        STEP.guard.add([("advantages", torch.tensor([True]))])
        raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="lost"):
        train(broken)
    train(lambda: micro_batch(0.8))
    assert STEP.take_metrics(None)


@TRAINERS
def test_a_broken_token_stops_the_step(train):
    with pytest.raises(ValueError, match="advantages at row 0 of micro-batch 0"):
        train(lambda: STEP.guard.add([("advantages", torch.tensor([True]))]))
