"""What the estimator refuses."""

import dataclasses

import pytest
import torch

from miles_sc import ScoreCenteringInputs, score_centering_loss
from tests.loss.oracle import estimator_inputs
from tests.loss.test_estimator import FIELDS, LOG_PROB_FIELDS, padded


def malformed(**changes):
    """Constructing or evaluating: either place may refuse."""
    return score_centering_loss(dataclasses.replace(estimator_inputs(padded()), **changes))


@pytest.mark.parametrize("shape", ["scalar", "one row", "one column", "extra axis"])
@pytest.mark.parametrize("name", FIELDS)
def test_broadcastable_shapes_are_refused(name, shape):
    value = getattr(estimator_inputs(padded()), name)
    wrong = {
        "scalar": value.flatten()[0],
        "one row": value[:1],
        "one column": value[..., :1] if value.ndim == 2 else value[:, None],
        "extra axis": value[None],
    }[shape]
    malformed()
    with pytest.raises(ValueError):
        malformed(**{name: wrong})


@pytest.mark.parametrize("name", LOG_PROB_FIELDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_log_probs_must_be_floating(name, dtype):
    value = getattr(estimator_inputs(padded()), name)
    with pytest.raises(ValueError, match=name):
        malformed(**{name: torch.zeros(value.shape, dtype=dtype)})


@pytest.mark.parametrize("name", ["head_mask", "active"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8])
def test_masks_must_be_bool(name, dtype):
    with pytest.raises(ValueError, match=name):
        malformed(**{name: getattr(estimator_inputs(padded()), name).to(dtype)})


def test_inputs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimator_inputs(padded()).advantages = None


@pytest.mark.parametrize("name", ["train_log_probs", "train_head_log_probs", "rollout_log_probs", "head_mask", "advantages"])
@pytest.mark.parametrize("value", [None, [0.0, 0.0]])
def test_what_is_no_tensor_is_refused_by_name(name, value):
    fields = {
        "train_log_probs": torch.zeros(2), "train_head_log_probs": torch.zeros(2, 3), "rollout_log_probs": torch.zeros(2),
        "rollout_head_log_probs": torch.zeros(2, 3), "head_mask": torch.ones(2, 3).bool(), "advantages": torch.zeros(2),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} is a (NoneType|list): give a tensor"):
        ScoreCenteringInputs(**(fields | {name: value}))
