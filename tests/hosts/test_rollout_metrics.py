"""What the recorded rows of a rollout hold, against numbers written out by hand."""

import numpy as np
import pytest

from miles_sc.hosts.rollout_metrics import recorded_head
from miles_sc.rollout.sample import Sample


def sample(tokens, heads, masses, loss_mask):
    """A response of ``tokens``, whose rows are ``heads`` with ``masses``; -1 is an unused slot."""
    ids = np.array(heads, np.int32)
    log_probs = np.where(ids < 0, -np.inf, np.log(np.array(masses, np.float32))[:, None]).astype(np.float32)
    log_probs -= np.log(np.maximum((ids >= 0).sum(axis=1, keepdims=True), 1)).astype(np.float32)  # evenly over its slots
    return Sample(
        tokens=[9, *tokens], response_length=len(tokens), loss_mask=loss_mask, rollout_log_probs=[-1.0] * len(tokens),
        rollout_topk_token_ids=ids, rollout_topk_log_probs=log_probs,
    )  # fmt: skip


def test_mass_and_hits_are_of_trained_tokens():
    given = [
        sample([3, 5, 7], [[3, 4], [1, 2], [-1, -1]], [0.9, 0.5, 1.0], [1, 1, 0]),
        sample([2], [[2, 8]], [0.7], [1]),
    ]
    found = recorded_head(given)
    assert found == {
        "topk_head_mass": pytest.approx(0.7), "topk_head_mass_min": pytest.approx(0.5),
        "topk_sampled_in_head": pytest.approx(2 / 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [[], [Sample(tokens=[9, 1], response_length=1)], [sample([3], [[3, 4]], [0.9], [0])]],
    ids=["no samples", "nothing recorded", "nothing trained"],
)
def test_without_a_recorded_trained_token_nothing_is_said(given):
    assert recorded_head(given) == {}


def test_a_removed_sample_is_not_counted():
    given = sample([3], [[3, 4]], [0.9], [1])
    given.remove_sample = True
    assert recorded_head([given]) == {}


def test_without_a_mask_every_token_is_trained():
    found = recorded_head([sample([3, 5], [[3, 4], [1, 2]], [0.9, 0.5], None)])
    assert found["topk_head_mass"] == pytest.approx(0.7) and found["topk_sampled_in_head"] == 0.5


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 entries for 1 response tokens"):
        recorded_head([sample([3], [[3, 4]], [0.9], [1, 1])])


def test_misaligned_rows_are_refused():
    given = sample([3, 5], [[3, 4], [1, 2]], [0.9, 0.5], [1, 1])
    given.rollout_topk_token_ids, given.rollout_topk_log_probs = (
        given.rollout_topk_token_ids[:1],
        given.rollout_topk_log_probs[:1],
    )
    with pytest.raises(ValueError, match="has 1 rows for a response of 2 tokens"):
        recorded_head([given])
