"""Candidate log-probs and entropy over the true vocabulary, against dense float64."""

import math
from functools import partial

import pytest
import torch

from miles_sc import linear_selected_log_probs, selected_log_probs, support_log_probs
from tests.loss.oracle import dense_entropy, dense_log_probs

VOCAB, WIDTH = 11, 14  # three padded columns, as a vocabulary rounded up for sharding has
IDS = torch.tensor([[3, 3, 0, 10], [0, 1, 2, 4], [10, 5, 5, 5], [7, -1, 9, -1], [-1, -1, -1, -1], [2, 9, 2, -1]])


def close(actual, expected, atol=1e-12, rtol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def random_logits(rows=6, width=WIDTH, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, width, dtype=torch.float64, generator=generator)).to(dtype)


def cotangents(shape, seed=5):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradient(score, logits, *upstream):
    """Outputs of ``score(logits)`` and the gradient under the given cotangents."""
    logits = logits.detach().clone().requires_grad_()
    outputs = score(logits)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)])
    return [o.detach() for o in outputs], logits.grad


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("chunk_size", [-1, 1, 3, 100])
def test_values_and_gradients_equal_dense(chunk_size, temperature, inplace_backward):
    """Duplicates, unused slots, an unused sampled token and padded columns, all at once."""
    logits, upstream = random_logits(), cotangents((6, 4))
    options = {"vocab_size": VOCAB, "temperature": temperature}
    score = partial(selected_log_probs, token_ids=IDS, chunk_size=chunk_size, inplace_backward=inplace_backward, **options)
    (actual,), actual_gradient = gradient(lambda x: score(x * 1), logits, upstream)
    (expected,), expected_gradient = gradient(lambda x: dense_log_probs(x, IDS, **options), logits, upstream)
    close(actual, expected)
    close(actual_gradient, expected_gradient)
    assert (actual[IDS == -1] == 0).all()
    assert (actual_gradient[:, VOCAB:] == 0).all()
    assert (actual_gradient[4] == 0).all()


@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("chunk_size", [-1, 1, 3, 100])
def test_entropy_and_its_gradient_equal_dense(chunk_size, temperature, inplace_backward):
    """Of the same distribution: over the true vocabulary, at the temperature; also where no id is asked for."""
    logits, upstream = random_logits(), (cotangents((6, 4)), cotangents((6,), seed=6))
    options = {"vocab_size": VOCAB, "temperature": temperature}
    score = partial(
        selected_log_probs,
        token_ids=IDS,
        chunk_size=chunk_size,
        inplace_backward=inplace_backward,
        with_entropy=True,
        **options,
    )
    actual, actual_gradient = gradient(lambda x: score(x * 1), logits, *upstream)
    expected, expected_gradient = gradient(
        lambda x: (dense_log_probs(x, IDS, **options), dense_entropy(x, **options)), logits, *upstream
    )
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted)
    close(actual_gradient, expected_gradient)
    assert (actual_gradient[:, VOCAB:] == 0).all()


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_of_the_two_outputs_may_be_left_out_of_the_loss(wanted):
    logits = random_logits().requires_grad_()
    actual = selected_log_probs(logits, IDS, vocab_size=VOCAB, with_entropy=True)[wanted]
    expected = (dense_log_probs(logits, IDS, vocab_size=VOCAB), dense_entropy(logits, vocab_size=VOCAB))[wanted]
    (got,), (want,) = (torch.autograd.grad(x.sum(), logits) for x in (actual, expected))
    close(got, want)


@pytest.mark.parametrize("vocab_size", [None, VOCAB])
@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_gradcheck(chunk_size, vocab_size):
    logits = random_logits().requires_grad_()
    score = partial(
        selected_log_probs,
        token_ids=IDS,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
        temperature=0.7,
        with_entropy=True,
    )
    assert torch.autograd.gradcheck(score, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [-1, 4])
def test_low_precision_logits_are_scored_in_float32(dtype, chunk_size):
    """From the same rounded logits the scores differ by float32 rounding, the gradient by one more of its own dtype."""
    logits, upstream = random_logits(dtype=dtype), (cotangents((6, 4)), cotangents((6,), seed=6))
    options = {"vocab_size": VOCAB, "temperature": 1.3}
    actual, actual_gradient = gradient(
        lambda x: selected_log_probs(x, IDS, chunk_size=chunk_size, with_entropy=True, **options), logits, *upstream
    )
    expected, expected_gradient = gradient(
        lambda x: (dense_log_probs(x, IDS, **options), dense_entropy(x, **options)), logits.double(), *upstream
    )
    assert {x.dtype for x in actual} == {torch.float32}
    for got, wanted in zip(actual, expected, strict=True):
        close(got.double(), wanted, atol=2e-6, rtol=0)
    assert actual_gradient.dtype == dtype
    close(actual_gradient.double(), expected_gradient, atol=2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_widths(dtype):
    logits = random_logits()
    close(selected_log_probs(logits, IDS.to(dtype), vocab_size=VOCAB), dense_log_probs(logits, IDS, vocab_size=VOCAB))


@pytest.mark.parametrize("layout", ["transposed", "strided", "sliced", "expanded"])
def test_non_contiguous_logits(layout):
    base = random_logits()
    logits = {
        "transposed": lambda: base.T.contiguous().T,
        "strided": lambda: base.repeat_interleave(2, dim=1)[:, ::2],
        "sliced": lambda: torch.cat([base, base], dim=1)[:, :WIDTH],
        "expanded": lambda: base[:1].expand(6, WIDTH),
    }[layout]()
    leaf = logits.detach().requires_grad_()
    actual = selected_log_probs(leaf, IDS, vocab_size=VOCAB)
    expected = dense_log_probs(leaf, IDS, vocab_size=VOCAB)
    close(actual, expected)
    upstream = cotangents((6, 4))
    (got,), (wanted,) = (torch.autograd.grad((x * upstream).sum(), leaf) for x in (actual, expected))
    close(got, wanted)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_masked_logits(temperature):
    """Tokens that a grammar forbids: -inf for them, exact values and finite gradients beside them."""
    logits = random_logits()
    logits[:, [1, 5]] = -math.inf
    logits[3, 7] = -math.inf  # the sampled token of its row
    upstream = cotangents((6, 4))
    score = partial(selected_log_probs, token_ids=IDS, vocab_size=VOCAB, temperature=temperature, with_entropy=True)
    actual, actual_gradient = gradient(score, logits, upstream, cotangents((6,)))
    assert actual_gradient.isfinite().all()
    expected = dense_log_probs(logits, IDS, vocab_size=VOCAB, temperature=temperature)
    close(actual[0], expected)
    assert actual[0][3, 0] == -math.inf
    close(actual[1], dense_entropy(logits, vocab_size=VOCAB, temperature=temperature))
    # A very small logit has the same distribution, and a gradient that dense autograd can form.
    finite = logits.masked_fill(logits == -math.inf, -1e4)
    _, expected_gradient = gradient(
        lambda x: (
            dense_log_probs(x, IDS, vocab_size=VOCAB, temperature=temperature),
            dense_entropy(x, vocab_size=VOCAB, temperature=temperature),
        ),
        finite,
        upstream,
        cotangents((6,)),
    )
    close(actual_gradient, expected_gradient)


@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_large_logits_lose_no_more_than_their_own_rounding(shift):
    """``logit - logsumexp`` rounds to float32's step at the logits: 1e-3 at 1e4, and no overflow."""
    logits = torch.full((2, 8), shift, dtype=torch.float32, requires_grad=True)
    actual, entropy = selected_log_probs(logits, torch.tensor([[0, 1], [7, 7]]), with_entropy=True)
    actual.sum().backward()
    step = max(abs(shift) * torch.finfo(torch.float32).eps, 1e-6)
    close(actual, torch.full((2, 2), -math.log(8.0)), atol=step, rtol=0)
    close(entropy, torch.full((2,), math.log(8.0)), atol=step, rtol=0)
    expected = torch.full((2, 8), -0.25)
    expected[0, :2] += 1
    expected[1, 7] += 2
    close(logits.grad, expected, atol=step, rtol=0)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 3])
def test_no_rows_stay_connected_to_the_graph(chunk_size, with_entropy):
    logits = torch.zeros(0, WIDTH, requires_grad=True)
    ids = torch.zeros(0, 4, dtype=torch.long)
    result = selected_log_probs(logits, ids, vocab_size=VOCAB, chunk_size=chunk_size, with_entropy=with_entropy)
    scores, *entropy = result if with_entropy else (result,)
    assert scores.shape == (0, 4) and [e.shape for e in entropy] == [(0,)] * with_entropy
    (scores.sum() + sum(e.sum() for e in entropy)).backward()
    assert logits.grad.shape == (0, WIDTH)


def test_sampled_token_alone():
    logits = random_logits()
    close(selected_log_probs(logits, IDS[:, :1]), dense_log_probs(logits, IDS[:, :1]))


# --- Precision at a real vocabulary


@pytest.mark.parametrize("chunk_size", [-1, 1])
@pytest.mark.parametrize("scale", [1.0, 3.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_at_a_large_vocabulary(dtype, scale, chunk_size):
    """The tail is one minus a sum of exponentials: a float32 log_softmax loses it (7e-5 at this size)."""
    vocab, k = 151_936, 128
    logits = (scale * torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))).to(dtype)
    ids = logits.float().topk(1 + k, dim=1).indices
    actual = selected_log_probs(logits, ids, chunk_size=chunk_size).double()
    expected = dense_log_probs(logits, ids)
    assert (actual - expected).abs().max() < 2e-6
    tails = [1 - x[:, 1:].exp().sum(dim=1) for x in (actual, expected)]
    assert (tails[0] - tails[1]).abs().max() < 5e-6


# --- Memory


def reachable_tensors(output):
    """Tensors that the graph of ``output`` keeps as attributes of its functions, which no saved-tensor hook sees."""
    nodes, found = [output.grad_fn], []
    while nodes:
        node = nodes.pop()
        found += [x for x in getattr(node, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
        nodes += [n for n, _ in node.next_functions if n is not None]
    return found


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [-1, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_of_vocabulary_width_is_saved_beside_the_logits(dtype, temperature, chunk_size, with_entropy):
    """Not even a float32 copy of bf16 logits: what is kept shares the storage of the live logits or is small."""
    rows, width = 10, 64
    logits = random_logits(rows, width, dtype=dtype).requires_grad_()
    ids = torch.arange(rows * 4).reshape(rows, 4) % 60
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = selected_log_probs(
            logits,
            ids,
            vocab_size=60,
            temperature=temperature,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
        )
    scores = result[0] if with_entropy else result
    kept = saved + reachable_tensors(scores)
    assert kept
    storage = logits.untyped_storage().data_ptr()
    beside = [tuple(x.shape) for x in kept if x.untyped_storage().data_ptr() != storage]
    assert all(math.prod(shape) <= rows * 4 for shape in beside), beside


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inplace_backward_writes_over_the_logits(dtype, chunk_size, temperature):
    leaf = random_logits(dtype=dtype).requires_grad_()
    upstream = cotangents((6, 4)).to(torch.float64 if dtype == torch.float64 else torch.float32)
    options = {"vocab_size": VOCAB, "chunk_size": chunk_size, "temperature": temperature}
    expected = torch.autograd.grad((selected_log_probs(leaf, IDS, **options) * upstream).sum(), leaf)[0]
    live = leaf * 1
    address, arrived = live.data_ptr(), []
    live.register_hook(lambda g: arrived.append(g.data_ptr()))
    (selected_log_probs(live, IDS, inplace_backward=True, **options) * upstream).sum().backward()
    assert arrived == [address]
    close(leaf.grad, expected, atol=0, rtol=0)


def test_backward_leaves_the_logits_alone_by_default():
    leaf = random_logits().requires_grad_()
    before = leaf.detach().clone()
    selected_log_probs(leaf, IDS, vocab_size=VOCAB).sum().backward()
    close(leaf.detach(), before, atol=0, rtol=0)


# --- Refusals


@pytest.mark.parametrize("bad", [-2, VOCAB, WIDTH, 10**6])
@pytest.mark.parametrize("column", [0, 2])
def test_ids_out_of_range(bad, column):
    """Padded columns are no tokens either."""
    ids = IDS.clone()
    ids[1, column] = bad
    with pytest.raises(ValueError, match=str(bad)):
        selected_log_probs(random_logits(), ids, vocab_size=VOCAB)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*temperature)(?=.*{temperature})"):
        selected_log_probs(random_logits(), IDS, temperature=temperature)


@pytest.mark.parametrize("vocab_size", [0, -1, WIDTH + 1])
def test_bad_vocabulary_size(vocab_size):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*vocab_size)(?=.*{vocab_size})"):
        selected_log_probs(random_logits(), IDS.clamp(max=0), vocab_size=vocab_size)


@pytest.mark.parametrize("chunk_size", [0, -2])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match=rf"(?s)(?=.*chunk_size)(?=.*{chunk_size})"):
        selected_log_probs(random_logits(), IDS, chunk_size=chunk_size)


@pytest.mark.parametrize(
    "logits_shape, ids_shape",
    [
        ((6, 14), (5, 4)),
        ((6, 14), (1, 4)),
        ((6, 14), (6,)),
        ((14,), (1, 4)),
        ((1, 6, 14), (6, 4)),
        ((6, 14), (1, 6, 4)),
    ],
)
def test_shape_mismatch(logits_shape, ids_shape):
    with pytest.raises(ValueError):
        selected_log_probs(torch.zeros(logits_shape), torch.zeros(ids_shape, dtype=torch.long))


@pytest.mark.parametrize("ids", [IDS.double(), IDS > 3])
def test_ids_must_be_integers(ids):
    """1.7 would be cut to 1, a mask would read as the ids 0 and 1."""
    with pytest.raises(ValueError, match="token_ids"):
        selected_log_probs(random_logits(), ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": IDS.to(torch.uint16)}, "token_ids has dtype torch.uint16"),
        ({"logits": torch.zeros(6, WIDTH).to(torch.float8_e4m3fn)}, "give floating-point"),
        ({"chunk_size": 2.0}, "chunk_size = 2.0"),
        ({"chunk_size": True}, "chunk_size = True"),
        ({"vocab_size": 10.5}, "vocab_size = 10.5: give a whole number"),
        ({"vocab_size": True}, "vocab_size = True: give a whole number"),
        ({"temperature": "1"}, "temperature = '1'"),
        ({"temperature": torch.ones((), requires_grad=True)}, "temperature = tensor"),
        ({"logits": torch.zeros(20).as_strided((6, WIDTH), (1, 1)), "inplace_backward": True}, "overlap"),
        ({"logits": torch.zeros(1, WIDTH).expand(6, WIDTH), "inplace_backward": True}, "overlap"),
        ({"logits": torch.zeros(6, 1).expand(6, WIDTH), "inplace_backward": True}, "overlap"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(change, message):
    given = {"logits": random_logits(), "token_ids": IDS} | change
    with pytest.raises(ValueError, match=message):
        selected_log_probs(given.pop("logits"), given.pop("token_ids"), **given)


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_in_place_serves_any_layout_that_does_not_overlap(layout):
    base = random_logits(dtype=torch.float32)
    logits = base.T.contiguous().T if layout == "transposed" else base.repeat_interleave(2, dim=1)[:, ::2]
    gradients = []
    for inplace in (False, True):
        leaf = logits.clone(memory_format=torch.preserve_format).requires_grad_()
        scores = selected_log_probs(leaf * 1, IDS, vocab_size=VOCAB, inplace_backward=inplace)
        gradients.append(torch.autograd.grad(scores.sum(), leaf)[0])
    assert torch.equal(*gradients)


def test_in_place_is_loud_where_somebody_still_reads_the_logits():
    logits = random_logits(dtype=torch.float32).requires_grad_() * 1
    other = (logits**2).sum()
    loss = selected_log_probs(logits, IDS, vocab_size=VOCAB, inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_compiled_graph_scores_the_same(with_entropy):
    def step(logits):
        found = selected_log_probs(logits * 1, IDS, vocab_size=VOCAB, with_entropy=with_entropy)
        return found[0].sum() + found[1].sum() if with_entropy else found.sum()

    gradients = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        leaf = random_logits().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    close(*gradients)


@pytest.mark.parametrize("call", ["selected", "support", "linear"])
def test_a_sharded_dtensor_is_refused_with_what_to_give(call, tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Shard(1)])
        calls = {
            "selected": lambda: selected_log_probs(sharded, torch.zeros(2, 2, dtype=torch.long)),
            "support": lambda: support_log_probs(sharded, torch.zeros(2, 2, dtype=torch.long)),
            "linear": lambda: linear_selected_log_probs(torch.zeros(3, 4), sharded, torch.zeros(3, 2, dtype=torch.long)),
        }
        with pytest.raises(ValueError, match=r"is a DTensor: give .*\.to_local\(\), and the group"):
            calls[call]()
    finally:
        dist.destroy_process_group()
