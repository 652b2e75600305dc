"""Log-probs under the distribution over the recorded support, against dense float64."""

import math

import pytest
import torch

from miles_sc import support_log_probs
from tests.loss.oracle import dense_support_entropy, dense_support_log_probs

WIDTH, VOCAB = 14, 11
# Column 0 is the sampled token, the rest its support: of four, two, one and no tokens, with gaps anywhere.
IDS = torch.tensor([[3, 3, 0, 10, 7], [9, 9, 2, -1, -1], [10, -1, -1, 10, -1], [4, -1, -1, -1, -1], [5, 1, 5, -1, 6]])
EMPTY = 3


def close(actual, expected, atol=1e-12, rtol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def random_logits(dtype=torch.float64, rows=5, width=WIDTH):
    generator = torch.Generator().manual_seed(2)
    return (2 * torch.randn(rows, width, dtype=torch.float64, generator=generator)).to(dtype)


def cotangents(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def off_support(ids, width=WIDTH):
    columns = torch.arange(width).expand(len(ids), width)
    return torch.stack([~torch.isin(c, i[1:][i[1:] >= 0]) for c, i in zip(columns, ids, strict=True)])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_dense(dtype, with_entropy, temperature):
    logits = random_logits(dtype).requires_grad_()
    upstream, entropy_upstream = cotangents(5, 5), cotangents(5)
    options = {"vocab_size": VOCAB, "temperature": temperature}
    result = support_log_probs(logits, IDS, with_entropy=with_entropy, **options)
    actual, entropy = result if with_entropy else (result, None)
    dense_logits = logits.detach().double().requires_grad_()
    expected = dense_support_log_probs(dense_logits, IDS, temperature=temperature)
    objective, expected_objective = (actual * upstream).sum(), (expected * upstream).sum()
    rounding = 1e-12 if dtype == torch.float64 else 2e-6
    if with_entropy:
        expected_entropy = dense_support_entropy(dense_logits, IDS, temperature=temperature)
        close(entropy.double(), expected_entropy, atol=rounding, rtol=0)
        assert entropy[EMPTY] == 0
        objective = objective + (entropy * entropy_upstream).sum()
        expected_objective = expected_objective + (expected_entropy * entropy_upstream).sum()
    objective.backward()
    expected_objective.backward()
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(actual.double(), expected, atol=rounding, rtol=0)
    assert (actual[IDS == -1] == 0).all() and (actual[EMPTY] == 0).all()
    assert logits.grad.dtype == dtype
    relative = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps}[dtype]
    close(logits.grad.double(), dense_logits.grad, atol=rounding, rtol=relative)
    assert (logits.grad[off_support(IDS)] == 0).all()
    assert (logits.grad[EMPTY] == 0).all()


def test_support_of_one_token_is_certain():
    """Exactly 0 and no gradient: the only token that could be drawn."""
    logits = random_logits(torch.float32).requires_grad_()
    scores, entropy = support_log_probs(logits, IDS, with_entropy=True)
    (scores[2].sum() + entropy[2]).backward()
    assert (scores[2] == 0).all() and entropy[2] == 0
    assert (logits.grad == 0).all()


def test_whole_vocabulary_as_support_is_a_softmax():
    logits = random_logits()
    ids = torch.cat([torch.tensor([[4]] * 5), torch.arange(WIDTH).expand(5, WIDTH)], dim=1)
    scores, entropy = support_log_probs(logits, ids, with_entropy=True)
    expected = torch.log_softmax(logits, dim=1)
    close(scores, torch.cat([expected[:, 4:5], expected], dim=1))
    close(entropy, -(expected.exp() * expected).sum(dim=1))


def test_row_of_unused_slots():
    ids = IDS.clone()
    ids[EMPTY] = -1
    close(support_log_probs(random_logits(), ids), support_log_probs(random_logits(), IDS), atol=0, rtol=0)


def test_sampled_token_not_recorded():
    """An unused column 0 (an observation row) changes nothing for the support beside it."""
    ids = IDS.clone()
    ids[0, 0] = -1
    logits = random_logits().requires_grad_()
    actual, expected = support_log_probs(logits, ids), dense_support_log_probs(logits, ids)
    close(actual, expected)
    assert actual[0, 0] == 0 and (actual[0, 1:] < 0).all()
    (got,), (wanted,) = (torch.autograd.grad((x * cotangents(5, 5)).sum(), logits) for x in (actual, expected))
    close(got, wanted)


def test_gradcheck():
    def score(logits):
        return support_log_probs(logits, IDS, vocab_size=VOCAB, temperature=0.7, with_entropy=True)

    assert torch.autograd.gradcheck(score, (random_logits().requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_widths(dtype):
    close(support_log_probs(random_logits(), IDS.to(dtype)), dense_support_log_probs(random_logits(), IDS))


def test_non_contiguous_logits():
    leaf = random_logits().T.contiguous().T.detach().requires_grad_()
    actual, expected = support_log_probs(leaf, IDS), dense_support_log_probs(leaf, IDS)
    close(actual, expected)
    (got,), (wanted,) = (torch.autograd.grad((x * cotangents(5, 5)).sum(), leaf) for x in (actual, expected))
    close(got, wanted)


def test_masked_logits_off_the_support_do_not_matter():
    """Nor does anything else there: only the support is read."""
    logits = random_logits()
    spoilt = torch.where(off_support(IDS), math.nan, logits).requires_grad_()
    spoilt.data[1, 4] = -math.inf
    actual = support_log_probs(spoilt, IDS)
    close(actual, support_log_probs(logits, IDS), atol=0, rtol=0)
    actual.sum().backward()
    assert spoilt.grad.isfinite().all() and (spoilt.grad[off_support(IDS)] == 0).all()


def test_masked_logit_within_the_support():
    """The trainer forbids a token that the sampler's support holds: -inf for it, finite gradients for all."""
    logits = random_logits()
    logits[0, 0] = -math.inf
    leaf = logits.requires_grad_()
    actual, entropy = support_log_probs(leaf, IDS, with_entropy=True)
    assert actual[0, 2] == -math.inf
    without = IDS.clone()
    without[0, 2] = -1
    expected, expected_entropy = support_log_probs(logits, without, with_entropy=True)
    finite = actual.isfinite()
    close(actual[finite], expected[finite])
    close(entropy, expected_entropy)
    (torch.where(finite, actual, 0.0).sum() + entropy.sum()).backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_large_logits_lose_no_more_than_their_own_rounding(shift):
    logits = torch.full((2, 8), shift, requires_grad=True)
    scores = support_log_probs(logits, torch.tensor([[0, 0, 1], [7, 6, 7]]))
    scores.sum().backward()
    step = max(abs(shift) * torch.finfo(torch.float32).eps, 1e-6)
    close(scores, torch.full((2, 3), -math.log(2.0)), atol=step, rtol=0)
    expected = torch.zeros(2, 8)
    expected[0, :2] = expected[1, [7, 6]] = torch.tensor([0.5, -0.5])
    close(logits.grad, expected, atol=step, rtol=0)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_rows_stay_connected_to_the_graph(with_entropy):
    logits = torch.zeros(0, WIDTH, requires_grad=True)
    result = support_log_probs(logits, torch.zeros(0, 5, dtype=torch.long), with_entropy=with_entropy)
    scores, *entropy = result if with_entropy else (result,)
    assert scores.shape == (0, 5) and [e.shape for e in entropy] == [(0,)] * with_entropy
    (scores.sum() + sum(e.sum() for e in entropy)).backward()
    assert logits.grad.shape == (0, WIDTH)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_of_vocabulary_width_is_saved(dtype, temperature, with_entropy):
    """Not even the logits: the backward needs the support's probabilities only."""
    rows, width = 10, 64
    logits = random_logits(dtype, rows, width).requires_grad_()
    ids = torch.arange(rows * 4).reshape(rows, 4) % width
    ids = torch.cat([ids[:, 1:2], ids], dim=1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        support_log_probs(logits, ids, temperature=temperature, with_entropy=with_entropy)
    shapes = [tuple(x.shape) for x in saved]
    assert shapes and all(math.prod(shape) <= rows * 5 for shape in shapes), shapes


@pytest.mark.parametrize("bad", [-2, VOCAB, WIDTH])
@pytest.mark.parametrize("column", [0, 2])
def test_ids_out_of_range(bad, column):
    ids = IDS.clone()
    ids[1, column] = bad
    with pytest.raises(ValueError, match=str(bad)):
        support_log_probs(random_logits(), ids, vocab_size=VOCAB)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*temperature)(?=.*{temperature})"):
        support_log_probs(random_logits(), IDS, temperature=temperature)


@pytest.mark.parametrize("vocab_size", [0, -1, WIDTH + 1])
def test_bad_vocabulary_size(vocab_size):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*vocab_size)(?=.*{vocab_size})"):
        support_log_probs(random_logits(), IDS.clamp(max=0), vocab_size=vocab_size)


@pytest.mark.parametrize("logits_shape, ids_shape", [((5, 14), (4, 5)), ((5, 14), (1, 5)), ((5, 14), (5,)), ((14,), (1, 5))])
def test_shape_mismatch(logits_shape, ids_shape):
    with pytest.raises(ValueError):
        support_log_probs(torch.zeros(logits_shape), torch.zeros(ids_shape, dtype=torch.long))
