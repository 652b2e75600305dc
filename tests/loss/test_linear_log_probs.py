"""Scores and gradients from hidden states and the output weight, against dense float64 logits; the logits never exist."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sc import selected_log_probs
from miles_sc.loss import linear_log_probs as module
from miles_sc.loss.linear_log_probs import linear_selected_log_probs
from tests.loss.oracle import dense_log_probs

VOCAB, WIDTH, DEPTH = 11, 14, 5  # three padded columns
IDS = torch.tensor([[3, 3, 0, 10], [0, 1, 2, 4], [10, 5, 5, 5], [7, -1, 9, -1], [-1, -1, -1, -1], [2, 9, 2, -1]])
ROWS = len(IDS)


def close(actual, expected, atol=1e-12, rtol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(rows=ROWS, width=WIDTH, depth=DEPTH, dtype=torch.float64):
    return random(rows, depth, seed=1, dtype=dtype), random(width, depth, seed=2, dtype=dtype)


def cotangents(shape=IDS.shape):
    return random(*shape, seed=3)


def differentiated(score, hidden, weight, upstream):
    """Scores, and the gradients of hidden and weight."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    scores = score(hidden, weight)
    scores.backward(upstream.to(scores.dtype))
    return scores.detach(), hidden.grad, weight.grad


def dense(hidden, weight, token_ids=IDS, **options):
    return dense_log_probs(hidden.double() @ weight.double().T, token_ids, **options)


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch):
    """Four columns a tile: eleven are two tiles and a tail of three. Two rows where the caller leaves it to the device."""
    monkeypatch.setattr(module, "CPU_TILE", (2, 4))


@pytest.mark.parametrize("vocab_size", [None, VOCAB, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [-1, 1, 3, ROWS, 100])
def test_values_and_gradients_equal_dense(chunk_size, temperature, vocab_size):
    """Duplicates, unused slots, a row without ids and padded columns, all at once."""
    options = {"vocab_size": vocab_size, "temperature": temperature}
    ids = torch.where(IDS < 0, IDS, IDS % (vocab_size or WIDTH))
    score = partial(linear_selected_log_probs, token_ids=ids, chunk_size=chunk_size, **options)
    actual = differentiated(score, *layer(), cotangents())
    expected = differentiated(partial(dense, token_ids=ids, **options), *layer(), cotangents())
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted)
    assert (actual[0][ids == -1] == 0).all()
    assert (actual[1][4] == 0).all()
    assert (actual[2][vocab_size or WIDTH :] == 0).all()


@pytest.mark.parametrize("tile", [(1, 1), (3, 11), (512, 2048)])
def test_the_tile_changes_nothing(monkeypatch, tile):
    monkeypatch.setattr(module, "CPU_TILE", tile)
    score = partial(linear_selected_log_probs, token_ids=IDS, vocab_size=VOCAB)
    expected = differentiated(partial(dense, vocab_size=VOCAB), *layer(), cotangents())
    for got, wanted in zip(differentiated(score, *layer(), cotangents()), expected, strict=True):
        close(got, wanted)


def test_gradcheck():
    score = partial(linear_selected_log_probs, token_ids=IDS, vocab_size=VOCAB, temperature=0.7, chunk_size=4)
    assert torch.autograd.gradcheck(score, tuple(x.requires_grad_() for x in layer()))


def test_float32_equals_dense():
    score = partial(linear_selected_log_probs, token_ids=IDS, vocab_size=VOCAB, temperature=1.3)
    actual = differentiated(score, *layer(dtype=torch.float32), cotangents())
    expected = differentiated(partial(dense, vocab_size=VOCAB, temperature=1.3), *layer(dtype=torch.float32), cotangents())
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == torch.float32
        close(got, wanted.float(), atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_selected_log_probs_of_the_models_own_logits(dtype):
    """Also the rounding of the logits to the model's dtype is the head's own."""
    options = {"token_ids": IDS, "vocab_size": VOCAB, "temperature": 0.7}
    actual = differentiated(partial(linear_selected_log_probs, **options), *layer(dtype=dtype), cotangents())
    expected = differentiated(lambda h, w: selected_log_probs(h @ w.T, **options), *layer(dtype=dtype), cotangents())
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    tight = 1e-12 if dtype == torch.float64 else 3e-6
    close(actual[0], expected[0], atol=tight, rtol=tight)
    # both round the gradient of the logits and the sums over it
    rounding = max(4 * torch.finfo(dtype).eps, tight)
    for got, wanted in zip(actual[1:], expected[1:], strict=True):
        close(got, wanted, atol=rounding, rtol=rounding)


def test_sums_over_many_bfloat16_tiles_keep_float32(monkeypatch):
    """50 tiles in a row: a bfloat16 total would lose what each one adds."""
    monkeypatch.setattr(module, "CPU_TILE", (4, 4))
    hidden, weight = layer(rows=200, width=200, depth=16, dtype=torch.bfloat16)
    ids = torch.arange(400).reshape(200, 2) % 200
    # the same sign everywhere: the totals grow far beyond what one tile adds
    hidden, weight = hidden.abs().ceil(), weight.abs().ceil() / 64
    upstream = cotangents((200, 2)).abs()
    actual = differentiated(partial(linear_selected_log_probs, token_ids=ids), hidden, weight, upstream)
    expected = differentiated(partial(dense, token_ids=ids), hidden, weight, upstream)
    materialised = differentiated(lambda h, w: selected_log_probs(h @ w.T, ids), hidden, weight, upstream)
    for got, usual, wanted in zip(actual[1:], materialised[1:], expected[1:], strict=True):
        # half as much again: the product of a tile is rounded once; a total in bfloat16 would be at 3 and 5 times
        assert (got.double() - wanted.double()).norm() <= 2 * (usual.double() - wanted.double()).norm()


def test_a_large_vocabulary_keeps_a_millionth(monkeypatch):
    """Logits around 1024 over 152k columns and 75 tiles, from an exact matmul: what remains is the scoring's own error."""
    monkeypatch.setattr(module, "CPU_TILE", (4, 2048))
    hidden, weight = ((x * 16).round() / 16 for x in layer(rows=8, width=151936, depth=16, dtype=torch.float32))
    hidden[:, 0], weight[:, 0] = 64.0, 16.0
    ids = torch.randint(0, 151936, (8, 129), generator=torch.Generator().manual_seed(4))
    score = partial(linear_selected_log_probs, token_ids=ids)
    scores, hidden_gradient, weight_gradient = differentiated(score, hidden, weight, cotangents(ids.shape))
    exact = differentiated(partial(dense, token_ids=ids), hidden.double(), weight.double(), cotangents(ids.shape))
    close(scores.double(), exact[0], atol=2e-6, rtol=1e-7)
    # the first column of the gradients is a sum of large numbers that cancel
    for got, wanted in ((hidden_gradient, exact[1]), (weight_gradient, exact[2])):
        close(got[:, 1:].double(), wanted[:, 1:], atol=1e-6 * float(wanted.abs().max()), rtol=0)


def test_largest_logits_do_not_overflow():
    hidden, weight = (100 * x for x in layer())
    score = partial(linear_selected_log_probs, token_ids=IDS)
    for got, wanted in zip(
        differentiated(score, hidden, weight, cotangents()), differentiated(dense, hidden, weight, cotangents()), strict=True
    ):
        close(got, wanted, atol=1e-10, rtol=1e-10)


def test_columns_that_cannot_be_drawn_have_no_mass():
    """The first tiles hold -inf alone."""
    hidden, weight = layer()
    hidden[:, 0] = 1.0
    weight[:9, 0] = -torch.inf
    ids = torch.where(IDS < 0, IDS, 9 + IDS % 5)
    actual = linear_selected_log_probs(hidden, weight, ids)
    close(actual, dense(hidden, weight, ids))
    assert actual.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 6, WIDTH - 1])
def test_what_is_not_a_number_is_loud(value, column):
    hidden, weight = layer()
    hidden[:, 0] = 1.0
    weight[column, 0] = value
    scores = linear_selected_log_probs(hidden, weight, IDS)
    assert scores[IDS >= 0].isnan().all() and (scores[IDS < 0] == 0).all()


def test_a_row_without_any_possible_token_is_loud():
    hidden, weight = layer()
    hidden[:, 0] = 1.0
    weight[:, 0] = -torch.inf
    assert linear_selected_log_probs(hidden, weight, IDS)[IDS >= 0].isnan().all()


@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_no_rows_stay_connected(chunk_size):
    hidden, weight = (x.requires_grad_() for x in layer(rows=0))
    scores = linear_selected_log_probs(hidden, weight, IDS[:0], chunk_size=chunk_size)
    assert scores.shape == (0, 4)
    scores.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.shape == weight.shape and (weight.grad == 0).all()


def test_int32_ids_and_strided_inputs():
    hidden, weight = layer()
    strided = hidden.T.contiguous().T, weight.T.contiguous().T
    score = partial(linear_selected_log_probs, token_ids=IDS.int())
    for got, wanted in zip(
        differentiated(score, *strided, cotangents()), differentiated(dense, hidden, weight, cotangents()), strict=True
    ):
        close(got, wanted)


# memory

LARGE = {"rows": 96, "width": 640, "depth": 4}
LOGITS = LARGE["rows"] * LARGE["width"]
LARGE_TILE = (16, 32)
LARGE_IDS = torch.arange(96 * 5).reshape(96, 5)


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest new storage while the mode is on; ``given`` were there before."""

    def __init__(self, *given):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in given}
        self.elements = self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in self.known:
                self.calls += 1
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
@pytest.mark.parametrize("chunk_size", [-1, 32])
def test_the_logits_never_exist(monkeypatch, dtype, frozen, chunk_size):
    """The largest tensor is a gradient, a tile or as large as the scores; what is frozen gets none."""
    monkeypatch.setattr(module, "CPU_TILE", LARGE_TILE)
    hidden, weight = layer(**LARGE, dtype=dtype)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    with LargestAllocation(hidden, weight, LARGE_IDS) as forward:
        scores = linear_selected_log_probs(hidden, weight, LARGE_IDS, chunk_size=chunk_size)
    upstream = torch.ones_like(scores)
    with LargestAllocation(hidden, weight, LARGE_IDS, upstream) as backward:
        scores.backward(upstream)
    tile = (LARGE_TILE[0] if chunk_size == -1 else chunk_size) * LARGE_TILE[1]
    assert forward.calls and forward.elements == max(tile, LARGE_IDS.numel())
    assert backward.calls and backward.elements < LOGITS
    assert backward.elements == (max(tile, LARGE_IDS.numel()) if frozen == "weight" else weight.numel())
    assert (hidden.grad is None) == (frozen == "hidden") and (weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_leaves_the_other_gradient_alone(frozen):
    inputs = layer()
    inputs[1 - frozen].requires_grad_()
    linear_selected_log_probs(*inputs, IDS, vocab_size=VOCAB).backward(cotangents())
    expected = differentiated(partial(dense, vocab_size=VOCAB), *layer(), cotangents())
    close(inputs[1 - frozen].grad, expected[2 - frozen])


def test_saved_are_the_inputs_the_ids_and_two_numbers_per_row():
    hidden, weight = (x.requires_grad_() for x in layer(**LARGE))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_selected_log_probs(hidden, weight, LARGE_IDS)
    assert [tuple(x.shape) for x in saved] == [(96, 4), (640, 4), (96, 5), (96,), (96,)]
    assert saved[0].data_ptr() == hidden.data_ptr() and saved[1].data_ptr() == weight.data_ptr()


def test_a_second_derivative_is_refused():
    hidden, weight = (x.requires_grad_() for x in layer())
    scores = linear_selected_log_probs(hidden, weight, IDS)
    (gradient,) = torch.autograd.grad(scores.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# errors

HIDDEN, WEIGHT = layer()


@pytest.mark.parametrize(
    "hidden, weight, message",
    [
        ([[1.0]], WEIGHT, r"hidden list: give floating-point \[T, D\]"),
        (HIDDEN[0], WEIGHT, r"hidden \(\(5,\), torch.float64\)"),
        (HIDDEN.long(), WEIGHT, r"hidden \(\(6, 5\), torch.int64\): give floating-point"),
        (HIDDEN, None, r"weight NoneType: give floating-point \[V, D\]"),
        (HIDDEN, WEIGHT[None], r"weight \(\(1, 14, 5\), torch.float64\)"),
        (HIDDEN, WEIGHT.int(), r"weight \(\(14, 5\), torch.int32\)"),
        (HIDDEN, WEIGHT.T, r"hidden \(6, 5\) and weight \(5, 14\) differ in D: give"),
        (HIDDEN, WEIGHT.float(), r"hidden is torch.float64 on cpu, weight torch.float32 on cpu: cast both"),
        (HIDDEN, WEIGHT.to("meta"), r"weight torch.float64 on meta"),
    ],
)
def test_a_wrong_layer_is_refused(hidden, weight, message):
    with pytest.raises(ValueError, match=message):
        linear_selected_log_probs(hidden, weight, IDS)


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (IDS[:5], {}, "for 6 rows"),
        (IDS.float(), {}, "give int64 or int32"),
        (IDS, {"vocab_size": 10}, r"-1\.\.9"),
        (IDS - 1, {}, "-2"),
        (IDS, {"vocab_size": 15}, r"vocab_size = 15: must lie in 1\.\.14"),
        (IDS, {"temperature": 0.0}, "temperature = 0.0"),
        (IDS, {"chunk_size": 0}, "chunk_size = 0"),
    ],
)
def test_wrong_arguments_are_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        linear_selected_log_probs(HIDDEN, WEIGHT, ids, **options)
