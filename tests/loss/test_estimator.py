"""The estimator against golden values, its identities and the dense oracle."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_sc import ScoreCenteringInputs, score_centering_loss, selected_log_probs
from miles_sc.loss.score_centering.importance_sampling import importance_sampling
from tests.loss.oracle import DenseBatch, estimator_inputs, reference, weight_function

MODES = ["none", "tis", "mis"]
TIGHT = {"tis_clip": 1.2, "mis_low": 0.8, "mis_high": 1.3}
LOOSE = {"tis_clip": 2.0, "mis_low": 0.5, "mis_high": 5.0}
LOG_PROB_FIELDS = ["train_log_probs", "train_head_log_probs", "rollout_log_probs", "rollout_head_log_probs"]
FIELDS = [*LOG_PROB_FIELDS, "head_mask", "advantages", "active"]
METRICS = {
    "sc_correction",
    "sc_coefficient_l1",
    "sc_train_head_mass",
    "sc_rollout_head_mass",
    "sc_tail_ratio",
    "sc_tail_floor_fraction",
    "sc_importance_weight",
    "sc_weight_clipped_fraction",
    "train_rollout_logprob_abs_diff",
    "train_rollout_kl",
}
NAN, INF = math.nan, math.inf


def close(actual, expected, atol=1e-12, rtol=1e-12):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def log_softmax(logits):
    return torch.log_softmax(logits, dim=-1)


def saying(*parts):
    """An error message that holds every part, in any order."""
    return re.compile("".join(f"(?=.*{part})" for part in parts), re.DOTALL | re.IGNORECASE)


def run(batch, mode, logits=None, **options):
    """(loss, metrics, gradient [T, V] with respect to the logits) of one call."""
    logits = (batch.train_logits if logits is None else logits).detach().clone().requires_grad_()
    loss, metrics = score_centering_loss(estimator_inputs(batch, logits), importance_sampling=mode, **options)
    return loss.detach(), metrics, torch.autograd.grad(loss.sum(), logits)[0]


# --- golden values

GOLDEN = [  # y, mode, alpha, w, correction, loss
    (0, "none", 1.303799948872, 1.0, 0.383635035525, 2.201607592236),
    (0, "tis", 1.0, 1.2, 0.087997967908, 2.083382998599),
    (0, "mis", 0.0, 1.201551169046, -0.366649066335, 1.403934888595),
    (3, "none", 1.303799948872, 1.0, 0.383635035525, 4.001607592236),
    (3, "tis", 1.0, 1.2, 0.087997967908, 4.243382998599),
    (3, "mis", 0.0, 0.0, -0.366649066335, -0.549973599503),
]


def golden_batch(sampled):
    z = torch.tensor([[1.2, -0.3, 0.5, 0.0, -1.1, 0.8, -0.6]], dtype=torch.float64)
    zq = torch.tensor([[0.9, 0.1, 0.7, -0.4, -0.8, 0.2, -0.2]], dtype=torch.float64)
    return DenseBatch(z, log_softmax(zq), torch.tensor([[sampled, 0, 2, 5]]), torch.tensor([1.5], dtype=torch.float64))


@pytest.mark.parametrize("sampled, mode, alpha, weight, correction, loss", GOLDEN)
def test_golden_values(sampled, mode, alpha, weight, correction, loss):
    value, metrics, _ = run(golden_batch(sampled), mode, **TIGHT)
    rho = metrics["sc_tail_ratio"]
    expected = {
        "sc_tail_ratio": 1.303799948872,
        "sc_train_head_mass": 0.732858003378,
        "sc_rollout_head_mass": 0.651700278470,
        "sc_importance_weight": weight,
        "sc_correction": correction,
    }
    for name, number in expected.items():
        assert metrics[name].item() == pytest.approx(number, abs=1e-11), name
    assert importance_sampling(mode, **TIGHT).tail(rho).item() == pytest.approx(alpha, abs=1e-11)
    assert value.item() == pytest.approx(loss, abs=1e-11)


@pytest.mark.parametrize("sampled, mode, alpha, weight, correction, loss", GOLDEN)
def test_oracle_meets_the_golden_values(sampled, mode, alpha, weight, correction, loss):
    """Guards the oracle itself: the other tests are worth what it is worth."""
    dense = reference(golden_batch(sampled), weight_function(mode, **TIGHT))
    numbers = [x.item() for x in (dense.alpha, dense.weight, dense.correction, dense.loss)]
    assert numbers == pytest.approx([alpha, weight, correction, loss], abs=1e-11)


# --- against the oracle


def random_logits(rows, vocab, seed, scale=1.0):
    return scale * torch.randn(rows, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ids_with(head, sampled):
    return torch.cat([sampled[:, None], head], dim=1)


def advantages_like(rows, sign=1.0):
    return sign * torch.linspace(0.5, 1.5, rows, dtype=torch.float64)


def plain(rows=6, vocab=9, k=3, *, inside, seed=0):
    """The head is the sampler's top k, as an engine reports it; y is drawn from one side of it."""
    train, rollout = random_logits(rows, vocab, seed), log_softmax(random_logits(rows, vocab, seed + 100))
    order = rollout.argsort(dim=1, descending=True)
    position = torch.arange(rows) % k if inside else k + torch.arange(rows) % (vocab - k)
    sampled = order.gather(1, position[:, None])[:, 0]
    return DenseBatch(train, rollout, ids_with(order[:, :k], sampled), advantages_like(rows))


def whole_vocabulary():
    base = plain(inside=True)
    rows, vocab = base.train_logits.shape
    return base.with_(token_ids=ids_with(torch.arange(vocab).expand(rows, vocab), base.token_ids[:, 0]))


def complete_head(shift=0.0):
    """Supports of 1 to 4 tokens that are all there is; ``shift`` is a rounding error of the sampler's log-probs."""
    rows, vocab = 6, 9
    ids = torch.tensor(
        [[2, 2, -1, -1, -1], [0, 0, 3, -1, -1], [3, 0, 3, 7, -1], [8, 1, 2, 5, 8], [5, 1, 2, 5, 8], [7, 6, 7, -1, -1]]
    )
    rollout = random_logits(rows, vocab, 7)
    for row, support in enumerate(ids[:, 1:]):
        outside = ~torch.isin(torch.arange(vocab), support[support >= 0])
        rollout[row, outside] = -INF
    return DenseBatch(random_logits(rows, vocab, 8), log_softmax(rollout) + shift, ids, advantages_like(rows), complete=True)


def tail_of(train, rollout):
    """V = 6, K = 2: every combination of sizes of the two tails, the sampled token on either side."""
    tails = torch.tensor([[a, b] for a in train for b in rollout], dtype=torch.float64)

    def log_probs(tail):
        head = torch.stack([0.7 * (1 - tail), 0.3 * (1 - tail)], dim=1)
        return torch.cat([head, tail[:, None] * torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)], dim=1).log()

    rows = len(tails)
    ids = ids_with(torch.tensor([0, 1]).expand(rows, 2), torch.arange(rows) % 3)
    return DenseBatch(log_probs(tails[:, 0]), log_probs(tails[:, 1]), ids, advantages_like(rows))


def mass_above_one():
    """Rounding in an engine's log-probs can carry the head beyond a mass of 1: the tail is floored, never negative."""
    base = tail_of([1e-2, 1e-9], [1e-9, 1e-12])
    return base.with_(rollout_log_probs=base.rollout_log_probs + 3e-5)


def padded():
    """Rows with unused slots anywhere, a row without any candidate, rows that are not trained on."""
    base = plain(k=4, inside=True)
    ids = base.token_ids.clone()
    ids[1, 2] = ids[2, 1] = ids[2, 4] = -1
    ids[3, 1:] = -1
    active = torch.tensor([True, True, True, True, False, True])
    advantages = base.advantages.clone()
    advantages[5] = 0.0
    return base.with_(token_ids=ids, active=active, advantages=advantages)


def impossible_candidate():
    """The sampler gives a candidate probability 0: the slot holds -inf, the trainer's mass is centred still."""
    base = plain(inside=False)
    rollout = base.rollout_log_probs.scatter(1, base.token_ids[:, 2:3], -INF)
    return base.with_(rollout_log_probs=log_softmax(rollout))


BATCHES = {
    "inside": lambda: plain(inside=True),
    "outside": lambda: plain(inside=False),
    "one candidate": lambda: plain(k=1, inside=False),
    "K = V": whole_vocabulary,
    "p = q": lambda: (b := plain(inside=True)).with_(rollout_log_probs=log_softmax(b.train_logits)),
    "complete head": complete_head,
    "tails": lambda: tail_of([1e-2, 1e-3, 1e-9], [3e-2, 2.3e-3, 1e-9]),
    "mass above one": mass_above_one,
    "padding": padded,
    "impossible candidate": impossible_candidate,
}


@pytest.mark.parametrize("bounds", [TIGHT, LOOSE], ids=["tight", "loose"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BATCHES)
def test_value_gradient_and_metrics_equal_those_of_the_full_distribution(name, mode, sign, bounds):
    batch = BATCHES[name]()
    batch = batch.with_(advantages=sign * batch.advantages)
    dense = reference(batch, weight_function(mode, **bounds))
    loss, metrics, gradient = run(batch, mode, **bounds)
    close(loss, dense.loss)
    # A tail coefficient of alpha cancels against itself over the head: rounding scales with it, the gradient does not.
    scale = dense.alpha.clamp(min=1)[:, None]
    close(gradient / scale, dense.gradient / scale)
    for metric in ("correction", "coefficient_l1", "train_head_mass", "rollout_head_mass"):
        close(metrics[f"sc_{metric}"], getattr(dense, metric))
    close(metrics["sc_importance_weight"], dense.weight)
    floored = torch.minimum(dense.train_tail, dense.rollout_tail) < 1e-5
    floored &= not batch.complete
    close(metrics["sc_tail_floor_fraction"], floored.double())
    close(metrics["sc_tail_ratio"], torch.where(floored, 1.0, dense.tail_ratio))


def test_the_cases_reach_every_branch():
    """Without this a change of seed could leave a clip or a floor untested."""
    results = {mode: [reference(make(), weight_function(mode, **TIGHT)) for make in BATCHES.values()] for mode in MODES}
    alphas = {mode: torch.cat([r.alpha for r in rs]) for mode, rs in results.items()}
    weights = {mode: torch.cat([r.weight for r in rs]) for mode, rs in results.items()}
    assert (alphas["none"] > 100).any() and (alphas["none"] < 0.01).any()
    assert (alphas["tis"] == 1).any() and (alphas["tis"] < 1).any()
    assert (alphas["mis"] == 0).any() and (alphas["mis"] == 1).any()
    assert (weights["tis"] == 1.2).any() and (weights["tis"] < 1.2).any()
    assert (weights["mis"] == 0).any() and (weights["mis"] > 0).any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), mode=st.sampled_from(MODES), complete=st.booleans())
def test_gradient_equals_the_oracle_on_any_small_problem(data, mode, complete):
    vocab = data.draw(st.integers(2, 8), label="vocab")
    rows = data.draw(st.integers(1, 3), label="rows")
    k = data.draw(st.integers(1, vocab), label="k")
    logits = st.lists(st.floats(-2, 2, width=32), min_size=vocab, max_size=vocab)
    train, rollout = (torch.tensor([data.draw(logits) for _ in range(rows)], dtype=torch.float64) for _ in range(2))
    heads = torch.tensor([data.draw(st.permutations(range(vocab))) for _ in range(rows)])[:, :k]
    if complete:
        rollout = torch.full_like(rollout, -INF).scatter(1, heads, rollout.gather(1, heads))
        sampled = heads[:, data.draw(st.integers(0, k - 1), label="position")]
    else:
        sampled = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in range(rows)])
    advantages = torch.tensor([data.draw(st.floats(-3, 3, width=16)) for _ in range(rows)], dtype=torch.float64)
    # Bounds with no short binary form, so that no ratio of the drawn logits sits on an edge, where rounding decides.
    bounds = {"tis_clip": 1.3717, "mis_low": 0.71931, "mis_high": 1.83519}
    batch = DenseBatch(train, log_softmax(rollout), ids_with(heads, sampled), advantages, complete=complete)
    dense = reference(batch, weight_function(mode, **bounds))
    loss, _, gradient = run(batch, mode, **bounds)
    # rho divides by a tail of at least exp(-4) / 8: a rounding of 1e-16 there grows by rho / tail < 4e4.
    close(loss, dense.loss, atol=1e-10)
    close(gradient, dense.gradient, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_whole_vocabulary_does_not_depend_on_the_floor(mode):
    batch = whole_vocabulary()
    _, _, gradient = run(batch, mode, **TIGHT)
    for eps in (1e-3, 1e-12):
        close(gradient, reference(batch, weight_function(mode, **TIGHT), eps=eps).gradient)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "K = V"])
def test_constant_reward_gives_zero_expected_gradient(mode, complete):
    """Every y in turn, weighted by the sampler's probability of it."""
    vocab = 7
    train, rollout = random_logits(1, vocab, 1), log_softmax(random_logits(1, vocab, 2))
    ids = ids_with(torch.arange(vocab).expand(vocab, vocab), torch.arange(vocab))
    reward = torch.full((vocab,), 1.7, dtype=torch.float64)
    batch = DenseBatch(train.expand(vocab, -1), rollout.expand(vocab, -1), ids, reward, complete=complete)
    _, metrics, gradient = run(batch, mode, **LOOSE)
    assert gradient.abs().max() > 0.01
    assert mode == "none" or 0 < metrics["sc_weight_clipped_fraction"].mean() < 1
    close((rollout[0].exp()[:, None] * gradient).sum(dim=0), torch.zeros(vocab, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_have_no_correction(mode):
    _, metrics, _ = run(BATCHES["p = q"](), mode, **TIGHT)
    for name in ("sc_correction", "sc_coefficient_l1", "train_rollout_logprob_abs_diff", "train_rollout_kl"):
        close(metrics[name], torch.zeros(6, dtype=torch.float64))
    close(metrics["sc_importance_weight"], torch.ones(6, dtype=torch.float64))
    close(metrics["sc_tail_ratio"], torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("mode, bounds", [("tis", {"tis_clip": 1e4}), ("mis", {"mis_low": 1e-4, "mis_high": 1e4})])
@pytest.mark.parametrize("name", ["inside", "outside", "K = V", "complete head"])
def test_a_weight_that_never_clips_leaves_no_correction(name, mode, bounds):
    batch = BATCHES[name]()
    loss, metrics, _ = run(batch, mode, **bounds)
    ratio = (estimator_inputs(batch).train_log_probs - estimator_inputs(batch).rollout_log_probs).exp()
    close(metrics["sc_coefficient_l1"], torch.zeros_like(ratio))
    close(metrics["sc_weight_clipped_fraction"], torch.zeros_like(ratio))
    close(loss, -batch.advantages * ratio * estimator_inputs(batch).train_log_probs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shift", [1e-5, -1e-5])
def test_rounding_of_a_complete_head_is_not_a_tail(mode, shift):
    """Taken as an open head, a mass of 1 - 1e-5 over the floor would read as a ratio of 10."""
    batch = complete_head(shift)
    dense = reference(batch, weight_function(mode, **LOOSE))
    _, metrics, gradient = run(batch, mode, **LOOSE)
    assert (metrics["sc_tail_ratio"] == 1).all()
    assert (metrics["sc_tail_floor_fraction"] == 0).all()
    close(gradient, dense.gradient)


def test_tail_ratio_is_masked_where_either_tail_is_rounding():
    """Below 1e-5; at 2e-5 it is still read."""
    _, metrics, _ = run(tail_of([1e-2, 2e-5, 8e-6], [1e-2, 2e-5, 8e-6]), "none")
    assert metrics["sc_tail_floor_fraction"].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 1]
    expected = torch.tensor([1.0, 2e-3, 1.0, 500.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    close(metrics["sc_tail_ratio"], expected, rtol=1e-10)  # 1e-16 of rounding over a tail of 2e-5


@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_complete_head_uses_the_weight_of_one(mode):
    """alpha = f(1): a clip below 1, or a band without 1, applies to it."""
    bounds = {"tis_clip": 0.6, "mis_low": 1.1, "mis_high": 3.0}
    batch = complete_head()
    dense = reference(batch, weight_function(mode, **bounds))
    assert (dense.alpha == {"tis": 0.6, "mis": 0.0}[mode]).all()
    loss, metrics, gradient = run(batch, mode, **bounds)
    close(loss, dense.loss)
    close(metrics["sc_correction"], dense.correction)
    close(gradient, dense.gradient)


@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_zero_weight_meets_negative_infinity_without_nan(mode):
    """The trainer masks a candidate that the sampler drew: p = 0 gives f = 0, and 0 * -inf must not form."""
    batch = plain(inside=True)
    batch = batch.with_(train_logits=batch.train_logits.scatter(1, batch.token_ids[:, :1], -INF))
    dense = reference(batch, weight_function(mode, **LOOSE))
    assert (dense.weight == 0).all() and dense.gradient.abs().max() > 0.01
    loss, metrics, gradient = run(batch, mode, **LOOSE)
    close(loss, dense.loss)
    close(gradient, dense.gradient)
    assert all(values.isfinite().all() for values in metrics.values())


# --- gradients


@pytest.mark.parametrize("mode", MODES)
def test_only_train_log_probs_carry_gradient(mode):
    """p, q and w are constants: the coefficient of log p_y is -A w and nothing else."""
    inputs = estimator_inputs(plain(inside=False))
    variables = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in [*LOG_PROB_FIELDS, "advantages"]}
    loss, metrics = score_centering_loss(dataclasses.replace(inputs, **variables), importance_sampling=mode, **TIGHT)
    loss.sum().backward()
    close(variables["train_log_probs"].grad, -inputs.advantages * metrics["sc_importance_weight"])
    assert variables["train_head_log_probs"].grad.abs().max() > 0.01
    for name in ("rollout_log_probs", "rollout_head_log_probs", "advantages"):
        assert variables[name].grad is None or (variables[name].grad == 0).all(), name


def test_head_gradient_is_the_coefficient():
    """sum |d_i| is the reported L1, so the head's gradient A d_i carries no more than it."""
    inputs = estimator_inputs(plain(inside=True))
    head = inputs.train_head_log_probs.detach().requires_grad_()
    loss, metrics = score_centering_loss(dataclasses.replace(inputs, train_head_log_probs=head), importance_sampling="tis")
    loss.sum().backward()
    close(head.grad.abs().sum(dim=1), inputs.advantages * metrics["sc_coefficient_l1"])


@pytest.mark.parametrize("mode", MODES)
def test_active_none_means_every_token(mode):
    batch = plain(inside=True)
    loss, _, gradient = run(batch, mode)
    named_loss, _, named_gradient = run(batch.with_(active=torch.ones(6, dtype=torch.bool)), mode)
    close(loss, named_loss, atol=0, rtol=0)
    close(gradient, named_gradient, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    inputs = estimator_inputs(plain(inside=True))
    changes = {name: getattr(inputs, name).to(dtype) for name in [*LOG_PROB_FIELDS, "advantages"]}
    loss, metrics = score_centering_loss(dataclasses.replace(inputs, **changes))
    assert {loss.dtype, *(values.dtype for values in metrics.values())} == {dtype}


def test_no_tokens():
    """A rank may own no response row: an empty loss that still reaches the logits."""
    logits = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    train = selected_log_probs(logits, torch.zeros(0, 4, dtype=torch.long))
    empty, empty_head = torch.zeros(0, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.float64)
    inputs = ScoreCenteringInputs(train[:, 0], train[:, 1:], empty, empty_head, empty_head.bool(), empty)
    loss, metrics = score_centering_loss(inputs, importance_sampling="mis")
    loss.sum().backward()
    assert loss.shape == (0,) and logits.grad.shape == (0, 5)
    assert set(metrics) == METRICS and all(values.shape == (0,) for values in metrics.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab, k", [(50, 5), (50, 50), (3000, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_logits_end_to_end(dtype, vocab, k, mode):
    """Scores, loss and backward from float32 and bf16 logits; the oracle starts from the same rounded logits."""
    rows, generator = 8, torch.Generator().manual_seed(3)
    rollout = log_softmax(random_logits(rows, vocab, 4, scale=2.0))
    noise = 0.3 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)
    logits = (rollout + noise + 5.0).to(dtype).requires_grad_()
    head = rollout.topk(k, dim=1).indices
    sampled = torch.where(torch.arange(rows) % 2 == 0, head[:, 2], rollout.argsort(dim=1)[:, vocab // 2])
    # The sampler's log-probs arrive as float32 whatever the logits are.
    batch = DenseBatch(
        logits.detach(), rollout.float(), ids_with(head, sampled), advantages_like(rows) * torch.tensor([1, -1] * 4)
    )
    dense = reference(batch, weight_function(mode, **LOOSE))

    scores = selected_log_probs(logits, batch.token_ids)
    assert scores.dtype == torch.float32
    single = batch.with_(advantages=batch.advantages.float())
    inputs = dataclasses.replace(estimator_inputs(single), train_log_probs=scores[:, 0], train_head_log_probs=scores[:, 1:])
    loss, _ = score_centering_loss(inputs, importance_sampling=mode)
    loss.sum().backward()
    # float32: log-probs near 10 carry 1e-6, open heads leave a tail above 0.05. bf16: the gradient is rounded once.
    close(loss.detach().double(), dense.loss, atol=2e-5, rtol=1e-5)
    assert logits.grad.dtype == dtype
    close(logits.grad.double(), dense.gradient, atol=5e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5)
