"""Numbers that must not reach the optimizer, checked at once or through the guard; and those that may."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from miles_sc import score_centering_loss
from miles_sc.loss.finite_guard import FiniteGuard
from tests.loss.oracle import estimator_inputs
from tests.loss.test_estimator import INF, LOG_PROB_FIELDS, MODES, NAN, close, padded, plain, saying

# --- non-finite numbers

BROKEN = [
    *[(name, value) for name in LOG_PROB_FIELDS for value in (NAN, INF)],
    *[("advantages", value) for value in (NAN, INF, -INF)],
    ("rollout_log_probs", -INF),
]
ROW = 2


def leaves(inputs):
    """``inputs`` with train log-probs of its own, without the graph and the gradient of another call."""
    train = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in LOG_PROB_FIELDS[:2]}
    return dataclasses.replace(inputs, **train)


def sound(**changes):
    """Six sound tokens, all active."""
    changes = {"active": torch.ones(6, dtype=torch.bool), **changes}
    return leaves(dataclasses.replace(estimator_inputs(plain(inside=True)), **changes))


def broken_at(inputs, name, value, row=ROW):
    """``inputs`` with one number of one row replaced (of the second candidate, in a [T, K] field)."""
    changed = getattr(inputs, name).detach().clone()
    changed[(row, 1) if changed.ndim == 2 else row] = value
    return leaves(dataclasses.replace(inputs, **{name: changed}))


def fault(name, row=ROW):
    return rf"\b{name}\b", rf"row\D{{0,4}}{row}\b"


def micro_batch(index):
    return rf"micro.?batch\D{{0,4}}{index}\b"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, value", BROKEN)
def test_broken_number_of_an_active_token_is_named(name, value, mode):
    """In every mode: under mis a NaN ratio compares false and would silently be weighted 0."""
    with pytest.raises(ValueError, match=saying(*fault(name))):
        score_centering_loss(broken_at(sound(), name, value), importance_sampling=mode)


@pytest.mark.parametrize("name", ["train_log_probs", "train_head_log_probs"])
def test_impossible_token_under_a_non_zero_coefficient_is_named(name):
    with pytest.raises(ValueError, match=saying(*fault(name))):
        score_centering_loss(broken_at(sound(), name, -INF))


IMPOSSIBLE = [("train_log_probs", -INF), ("train_head_log_probs", -INF), ("rollout_head_log_probs", -INF)]
INACTIVE = [
    *[("active", name, value) for name, value in BROKEN + IMPOSSIBLE],
    *[("advantages", name, value) for name, value in BROKEN + IMPOSSIBLE if name != "advantages"],
    ("advantages", "advantages", -0.0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("idle, name, value", INACTIVE)
def test_inactive_token_contributes_exactly_zero_whatever_it_holds(idle, name, value, mode):
    switched_off = getattr(sound(), idle).clone()
    switched_off[ROW] = 0
    clean = sound(**{idle: switched_off})
    expected, _ = score_centering_loss(clean, importance_sampling=mode)
    expected.sum().backward()
    inputs = broken_at(clean, name, value)
    loss, metrics = score_centering_loss(inputs, importance_sampling=mode)
    loss.sum().backward()
    assert loss[ROW] == 0
    close(loss, expected, atol=0, rtol=0)
    for field in LOG_PROB_FIELDS[:2]:
        gradient = getattr(inputs, field).grad
        assert (gradient[ROW] == 0).all()
        close(gradient, getattr(clean, field).grad, atol=0, rtol=0)
    assert [metric for metric, values in metrics.items() if not values.isfinite().all()] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOG_PROB_FIELDS)
@pytest.mark.parametrize("value", [88.0, 1e30, -1e30])
def test_inactive_token_may_hold_memory_that_nobody_wrote(name, value, mode):
    """Finite, but exp of it is near or beyond the end of float32, where 0 * inf waits in the backward."""
    single = {field: getattr(sound(), field).float() for field in [*LOG_PROB_FIELDS, "advantages"]}
    inputs = sound(**single, active=torch.arange(6) != ROW)
    inputs = broken_at(inputs, name, value)
    loss, metrics = score_centering_loss(inputs, importance_sampling=mode)
    loss.sum().backward()
    assert loss[ROW] == 0
    for field in LOG_PROB_FIELDS[:2]:
        gradient = getattr(inputs, field).grad
        assert (gradient[ROW] == 0).all() and gradient.isfinite().all()
    assert [metric for metric, values in metrics.items() if not values.isfinite().all()] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["train_head_log_probs", "rollout_head_log_probs"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, 50.0])
def test_unused_slots_may_hold_anything(name, value, mode):
    inputs = sound()
    mask = inputs.head_mask.clone()
    mask[ROW, 1] = False
    clean = dataclasses.replace(sound(), head_mask=mask)
    expected, expected_metrics = score_centering_loss(clean, importance_sampling=mode)
    expected.sum().backward()
    inputs = broken_at(dataclasses.replace(inputs, head_mask=mask), name, value)
    loss, metrics = score_centering_loss(inputs, importance_sampling=mode)
    loss.sum().backward()
    close(loss.detach(), expected.detach(), atol=0, rtol=0)
    assert inputs.train_head_log_probs.grad[ROW, 1] == 0
    close(inputs.train_head_log_probs.grad, clean.train_head_log_probs.grad, atol=0, rtol=0)
    for metric, values in metrics.items():
        close(values, expected_metrics[metric], atol=0, rtol=0)


# --- guard


def guarded(guard, inputs, **options):
    return score_centering_loss(inputs, guard=guard, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, value", BROKEN)
def test_guard_waits_and_then_names_the_fault(name, value, mode):
    guard = FiniteGuard()
    guarded(guard, sound(), importance_sampling=mode)
    guarded(guard, broken_at(sound(), name, value), importance_sampling=mode)
    guarded(guard, sound(), importance_sampling=mode)
    with pytest.raises(ValueError, match=saying(*fault(name), micro_batch(1))):
        guard.raise_if_tripped()


@pytest.mark.parametrize("name", ["train_log_probs", "train_head_log_probs"])
def test_guard_names_an_impossible_token(name):
    guard = FiniteGuard()
    guarded(guard, broken_at(sound(), name, -INF))
    with pytest.raises(ValueError, match=saying(*fault(name), micro_batch(0))):
        guard.raise_if_tripped()


def test_guard_reports_the_first_fault():
    guard = FiniteGuard()
    guarded(guard, sound())
    guarded(guard, broken_at(broken_at(sound(), "advantages", NAN, row=5), "advantages", NAN, row=3))
    guarded(guard, broken_at(sound(), "rollout_log_probs", NAN, row=0))
    with pytest.raises(ValueError, match=saying(*fault("advantages", row=3), micro_batch(1))):
        guard.raise_if_tripped()


def test_guard_starts_afresh_after_it_has_raised():
    guard = FiniteGuard()
    guarded(guard, sound())
    guarded(guard, broken_at(sound(), "advantages", NAN))
    with pytest.raises(ValueError):
        guard.raise_if_tripped()
    guard.raise_if_tripped()
    guarded(guard, broken_at(sound(), "rollout_head_log_probs", INF, row=4))
    with pytest.raises(ValueError, match=saying(*fault("rollout_head_log_probs", row=4), micro_batch(0))):
        guard.raise_if_tripped()


def test_clean_guard_is_silent_and_changes_nothing():
    guard = FiniteGuard()
    guard.raise_if_tripped()
    batch = padded()
    expected, expected_metrics = score_centering_loss(estimator_inputs(batch))
    loss, metrics = guarded(guard, estimator_inputs(batch))
    guard.raise_if_tripped()
    close(loss, expected, atol=0, rtol=0)
    for name, values in metrics.items():
        close(values, expected_metrics[name], atol=0, rtol=0)


def test_guard_lets_inactive_tokens_be():
    guard = FiniteGuard()
    inputs = sound(advantages=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    for name, value in BROKEN:
        if name != "advantages":
            guarded(guard, broken_at(inputs, name, value))
    guard.raise_if_tripped()


def test_guard_tells_the_sample():
    """The callable of the faulty micro-batch speaks, not the latest one's."""
    guard = FiniteGuard()
    for index in range(3):
        guard.watch(lambda row, index=index: f"sample {index}-{row}")
        guarded(guard, broken_at(sound(), "advantages", NAN) if index == 1 else sound())
    with pytest.raises(ValueError, match=saying(*fault("advantages"), "sample 1-2")):
        guard.raise_if_tripped()


class NoSynchronisation(TorchDispatchMode):
    """Refuses the operators through which the host would wait for a device value or a data-dependent shape."""

    REFUSED = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "_unique2", "is_nonzero"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        assert name not in self.REFUSED and not by_mask, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_guarded_loss_never_waits_for_the_device(mode):
    guard = FiniteGuard()
    first, broken, last = sound(), broken_at(sound(), "rollout_log_probs", NAN), sound()
    with NoSynchronisation():
        for inputs in (first, broken, last):
            guarded(guard, inputs, importance_sampling=mode)
    with pytest.raises(ValueError, match=saying(*fault("rollout_log_probs"), micro_batch(1))):
        guard.raise_if_tripped()
