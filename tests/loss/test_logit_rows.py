"""Chosen rows scored where they lie in the logits, against dense float64 on a copy of them."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sc import selected_log_probs, support_log_probs
from miles_sc.loss.logit_rows import LogitRows
from tests.loss.oracle import dense_entropy, dense_log_probs, dense_support_entropy, dense_support_log_probs

SIZE, WIDTH, VOCAB, K = 12, 14, 11, 3
CHOSEN = {
    "all": list(range(SIZE)),
    "one run": [3, 4, 5],
    "first and last": [0, 11],
    "runs": [1, 2, 3, 6, 8, 9, 10],
    "none": [],
}
SCORES = {
    "selected": (selected_log_probs, dense_log_probs),
    "support": (support_log_probs, lambda x, ids, vocab_size, **options: dense_support_log_probs(x, ids, **options)),
}
ROWS = pytest.mark.parametrize("rows", CHOSEN.values(), ids=CHOSEN)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def random_logits(dtype=torch.float64):
    return (2 * torch.randn(SIZE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))).to(dtype)


def ids_for(rows):
    ids = torch.randint(0, VOCAB, (len(rows), 1 + K), generator=torch.Generator().manual_seed(4))
    ids[:, 1] = ids[:, 0]
    ids[1::3, 2] = -1
    return ids


def run(score, logits, *upstream):
    """Both outputs and the gradient under the given cotangents; the logits are no leaf, so that they may be written over."""
    leaf = logits.clone().requires_grad_()
    outputs = score(leaf * 1)
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)])
    return [o.detach().double() for o in outputs], leaf.grad


@ROWS
@DTYPES
@pytest.mark.parametrize(
    ("name", "settings"),
    [("selected", {}), ("selected", {"chunk_size": 2, "inplace_backward": True}), ("support", {})],
    ids=["selected", "in place", "support"],
)
def test_values_and_gradients_equal_dense(name, settings, rows, dtype):
    score, dense = SCORES[name]
    ids, options = ids_for(rows), {"vocab_size": VOCAB, "temperature": 0.7}
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(len(rows), 1 + K, generator=generator), torch.randn(len(rows), generator=generator)
    logits = random_logits(dtype)
    actual, gradient = run(lambda x: score(x, ids, rows=rows, with_entropy=True, **settings, **options), logits, *upstream)

    def of_a_copy(x):
        chosen = x[torch.tensor(rows, dtype=torch.long)]
        if name == "support":
            entropy = dense_support_entropy(chosen, ids, temperature=0.7)
        else:
            entropy = dense_entropy(chosen, **options)
        return dense(chosen, ids, **options), entropy

    expected, expected_gradient = run(of_a_copy, logits.double(), *upstream)
    rounding = 1e-12 if dtype == torch.float64 else 3e-6
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=rounding, rtol=0)
    relative = torch.finfo(dtype).eps if dtype == torch.bfloat16 else rounding
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=rounding, rtol=relative)
    others = np.setdiff1d(np.arange(SIZE), rows)
    assert gradient.dtype == dtype and not gradient[others].any() and not gradient[:, VOCAB:].any()


class Allocations(TorchDispatchMode):
    """The sizes of what operations have allocated; views do not count."""

    def __init__(self, *known):
        super().__init__()
        self.sizes = []
        self._storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in known}  # kept, so no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage()).data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = storage
                self.sizes.append(storage.nbytes())
        return result


@DTYPES
@pytest.mark.parametrize("name", SCORES)
def test_no_copy_of_the_rows_is_made(name, dtype):
    """Eight runs of a large matrix: nothing near its size is allocated, but the gradient."""
    size, width = 1024, 512
    rows = [i for i in range(size) if i % 128 < 100]
    ids = torch.randint(0, width, (len(rows), 1 + K), generator=torch.Generator().manual_seed(4))
    logits = torch.randn(size, width, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    chunked = {"chunk_size": 16} if name == "selected" else {}
    with Allocations(logits) as forward:
        scores = SCORES[name][0](logits, ids, rows=rows, **chunked)
    whole = logits.untyped_storage().nbytes()
    assert 0 < max(forward.sizes) < whole / 8
    with Allocations(logits) as backward:
        scores.sum().backward()
    assert [size for size in backward.sizes if size >= whole / 4] == [whole]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([2, 1], r"rows 1\.\.2 of 12 rows"),
        ([1, 1], "once each, ascending"),
        ([-1, 2], r"rows -1\.\.2"),
        ([3, 12], r"rows 3\.\.12 of 12"),
        (np.array([5, 3], np.uint8), "once each, ascending"),
        ([0.5], "whole numbers"),
        ([True, False], "whole numbers"),
        ([[1, 2]], "whole numbers"),
        (torch.tensor([1, 2]), "numpy array or a list"),
    ],
)
@pytest.mark.parametrize("name", SCORES)
def test_refused_rows(name, rows, told):
    with pytest.raises(ValueError, match=told):
        SCORES[name][0](random_logits(), ids_for([1, 2]), rows=rows)


@pytest.mark.parametrize("name", SCORES)
def test_ids_must_be_one_row_per_scored_row(name):
    with pytest.raises(ValueError, match="for 3 rows"):
        SCORES[name][0](random_logits(), ids_for([1, 2]), rows=[1, 2, 3])


def test_runs_and_what_lies_between_them():
    rows = LogitRows.of(CHOSEN["runs"], SIZE)
    assert rows.runs == (slice(1, 4), slice(6, 7), slice(8, 11)) and len(rows) == 7
    assert list(rows) == [(slice(1, 4), slice(0, 3)), (slice(6, 7), slice(3, 4)), (slice(8, 11), slice(4, 7))]
    assert list(rows.others()) == [slice(0, 1), slice(4, 6), slice(7, 8), slice(11, 12)]
    assert list(LogitRows.of([], SIZE).others()) == [slice(0, SIZE)]
