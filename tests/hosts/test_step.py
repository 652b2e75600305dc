"""What a host's optimizer step leaves behind, and what the next one must not find."""

import pytest
import torch

from miles_sc.hosts.loss import STEP, forward_backward
from miles_sc.loss.batch import LossBatch


def micro_batch(value):
    """One trained token with a metric."""
    ones = torch.ones(1)
    batch = LossBatch(torch.zeros(1, 1, dtype=torch.long), ones, ones.bool(), ones, ones)
    STEP.add({"sc_train_head_mass": torch.tensor([value])}, batch)


def stepped(work):
    """``work`` as the forwards and backwards of one step, where a host's train step calls them."""
    forward_backward(lambda: work, None, (), {})()
    return STEP.take_metrics(None)


def test_a_step_that_was_given_up_leaves_nothing():
    """A host may retry a step whose metrics it could not reduce."""
    forward_backward(lambda: lambda: micro_batch(0.2), None, (), {})()
    assert stepped(lambda: micro_batch(0.8))["sc_train_head_mass"] == pytest.approx(0.8)


def test_a_broken_token_of_a_step_that_was_given_up_is_forgotten():
    def broken():
        STEP.guard.add([("advantages", torch.tensor([True]))])
        raise RuntimeError("a rank was lost")

    with pytest.raises(RuntimeError, match="lost"):
        stepped(broken)
    assert stepped(lambda: micro_batch(0.8))


def test_a_broken_token_stops_the_step():
    with pytest.raises(ValueError, match="advantages at row 0 of micro-batch 0"):
        stepped(lambda: STEP.guard.add([("advantages", torch.tensor([True]))]))
