"""How rows become one number: the weight of each row, so that summing weighted rows is the whole reduction."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from miles_sc.loss.batch import LossBatch


def row_weights(loss_masks: Sequence[np.ndarray], *, per_token: bool) -> list[float]:
    """The weight of an active row of each sample of one optimizer step, over all data-parallel ranks.

    Args:
        loss_masks: one array of 0 and 1 per sample.
        per_token: every active token counts alike (``--calculate-per-token-loss``); otherwise every sample does, and its
            active tokens share its weight.

    A masked token or sample is in no denominator: the loss of a half-masked batch is that of the other half.
    """
    counts = [int(np.sum(mask)) for mask in loss_masks]
    if per_token:
        total = sum(counts)
        return [1 / total if count else 0.0 for count in counts]
    samples = sum(count > 0 for count in counts)
    return [1 / (samples * count) if count else 0.0 for count in counts]


def weighted_sum(values: Tensor, batch: LossBatch) -> Tensor:
    """``sum_t weight_t value_t`` over active rows, 0-d: this micro-batch's share of a step's mean."""
    # an inactive row may hold NaN; it is replaced, not multiplied
    return (values.where(batch.active, 0.0) * batch.weights).sum()
