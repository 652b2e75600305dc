"""Two ranks that hold half the vocabulary each score and differentiate as one rank that holds it all."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from miles_sc import ScoreCenteringInputs, score_centering_loss, selected_log_probs, support_log_probs

ROWS, WIDTH, RANKS = 7, 10, 2
SHARD = WIDTH // RANKS

CASES = {
    "padded": {"vocab_size": 9},
    "whole": {"vocab_size": None},
    "chunks": {"vocab_size": 9, "chunk_size": 3},
    "temperature": {"vocab_size": 9, "temperature": 0.7},
    "in place": {"vocab_size": 9, "inplace_backward": True},
    # The second rank then holds padding only: its maximum is -inf, and must not turn a sum into NaN.
    "rank of padding": {"vocab_size": 4},
    "rank boundary": {"vocab_size": 5},
}
SUPPORT_CASES = {"padded": {"vocab_size": 9}, "temperature": {"vocab_size": 9, "temperature": 1.3}}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LOSSES = ["none", "tis", "mis"]


def logits_of(dtype):
    generator = torch.Generator().manual_seed(11)
    return (2 * torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)).to(dtype)


def masked_logits():
    """Row 0 may only draw from the first rank, row 1 only from the second, row 2 from a few of both."""
    logits = logits_of(torch.float64)
    logits[0, SHARD:] = logits[1, :SHARD] = logits[2, 1:7] = -torch.inf
    return logits


def ids_within(vocab_size):
    """Rows whose ids lie on the first rank, on the second, on both, twice, and nowhere."""
    ids = torch.tensor([[0, 1, 4, 2], [5, 8, 6, 7], [4, 5, 0, 8], [3, 3, 8, 8], [8, -1, -1, 0], [-1, -1, -1, -1], [7, 0, -1, 4]])
    return torch.where(ids < 0, ids, ids % (vocab_size or WIDTH))


SUPPORT = torch.tensor([[0, 0, 4, 2], [5, 8, 5, 7], [4, 5, 4, 8], [3, 3, -1, -1], [8, -1, 8, 0], [-1, -1, -1, -1], [7, 0, -1, 7]])


def cotangents(dtype):
    generator = torch.Generator().manual_seed(12)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(ROWS, 4, generator=generator, dtype=dtype), torch.randn(ROWS, generator=generator, dtype=dtype)


def scored(score, logits, upstream):
    """Scores, entropy and the gradient with respect to this rank's logits."""
    leaf = logits.clone().requires_grad_()
    outputs = score(leaf * 1)
    torch.autograd.backward(outputs, upstream)
    return [*(x.detach() for x in outputs), leaf.grad]


def loss_of(logits, mode, group):
    """The whole estimator over sharded scores: the loss is replicated, so the backward reduces nothing."""
    leaf = logits.clone().requires_grad_()
    scores = selected_log_probs(leaf, ids_within(9), group=group, vocab_size=9)
    rollout = selected_log_probs(logits_of(torch.float64).flip(0), ids_within(9), vocab_size=9)
    advantages = torch.linspace(-1, 1.5, ROWS, dtype=torch.float64)
    inputs = ScoreCenteringInputs(
        scores[:, 0], scores[:, 1:], rollout[:, 0], rollout[:, 1:], ids_within(9)[:, 1:] >= 0, advantages
    )
    loss, _ = score_centering_loss(inputs, importance_sampling=mode)
    loss.sum().backward()
    return [loss.detach(), leaf.grad]


def evaluate(shard, group):
    """Every case on the columns ``shard`` of the logits."""
    results = {}
    for dtype_name, dtype in DTYPES.items():
        logits, upstream = logits_of(dtype)[:, shard], cotangents(dtype)
        for name, options in CASES.items():
            ids = ids_within(options["vocab_size"])
            results["selected", name, dtype_name] = scored(
                lambda x, ids=ids, options=options: selected_log_probs(x, ids, group=group, with_entropy=True, **options),
                logits,
                upstream,
            )
        for name, options in SUPPORT_CASES.items():
            results["support", name, dtype_name] = scored(
                lambda x, options=options: support_log_probs(x, SUPPORT, group=group, with_entropy=True, **options),
                logits,
                upstream,
            )
    results["selected", "masked shard", "float64"] = scored(
        lambda x: selected_log_probs(x, ids_within(9), group=group, vocab_size=9, with_entropy=True),
        masked_logits()[:, shard],
        cotangents(torch.float64),
    )
    for mode in LOSSES:
        results["loss", mode, "float64"] = loss_of(logits_of(torch.float64)[:, shard], mode, group)
    no_rows = torch.zeros(0, WIDTH, dtype=torch.float64)[:, shard].requires_grad_()
    empty = selected_log_probs(no_rows, torch.zeros(0, 4, dtype=torch.long), group=group, vocab_size=9)
    empty.sum().backward()
    results["selected", "no rows", "float64"] = [empty.detach(), no_rows.grad]
    return results


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        results = evaluate(slice(rank * SHARD, (rank + 1) * SHARD), dist.group.WORLD)
        refused = []
        for bad in ({"vocab_size": WIDTH + 1}, {"vocab_size": 0}):
            try:
                selected_log_probs(logits_of(torch.float64)[:, :SHARD], ids_within(4), group=dist.group.WORLD, **bad)
            except ValueError:
                refused.append(bad["vocab_size"])
        torch.save((results, refused), f"{folder}/rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("vocab_parallel"))
    mp.spawn(worker, args=(folder,), nprocs=RANKS)
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def one_rank():
    return evaluate(slice(None), None)


KEYS = [
    *[("selected", name, dtype) for name in CASES for dtype in DTYPES],
    *[("support", name, dtype) for name in SUPPORT_CASES for dtype in DTYPES],
    *[("loss", mode, "float64") for mode in LOSSES],
    ("selected", "masked shard", "float64"),
    ("selected", "no rows", "float64"),
]


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_two_ranks_equal_one(ranks, one_rank, key):
    *values, gradient = one_rank[key]
    exact = key[2] == "float64"
    # The order of a sum differs between one rank and two: rounding of float32, and once more of a bf16 gradient.
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if exact else {"atol": 2e-6, "rtol": 1e-6}
    last = dict(tolerance, rtol=2**-7) if key[2] == "bfloat16" else tolerance
    for rank, (results, _) in enumerate(ranks):
        *sharded, shard_gradient = results[key]
        for actual, expected in zip(sharded, values, strict=True):
            torch.testing.assert_close(actual, expected, **tolerance)
        expected = gradient[:, rank * SHARD : (rank + 1) * SHARD]
        torch.testing.assert_close(shard_gradient, expected, **last)


def test_the_gradients_are_finite_and_not_all_zero(one_rank):
    gradients = [one_rank[key][-1] for key in KEYS if key[1] != "no rows"]
    assert all(g.isfinite().all() and g.abs().max() > 0.01 for g in gradients)


def test_vocabulary_size_counts_all_ranks(ranks):
    assert [refused for _, refused in ranks] == [[WIDTH + 1, 0]] * RANKS
