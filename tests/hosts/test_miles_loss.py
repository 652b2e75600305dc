"""One training step through Miles's real functions on gloo, against the inner ring on the same numbers in one process."""

import pytest
import torch

from miles_sc.hosts.activation import activation
from tests.distributed.launch import launch
from tests.hosts.inner_ring import inner_ring
from tests.hosts.miles_host import needs_miles, on_the_cpu, run_of
from tests.hosts.miles_step import set_parallel_groups, step
from tests.hosts.step_data import PAD_MULTIPLIER, RESPONSE, TOTAL, VOCAB, logits_of, rollout_data

pytestmark = needs_miles

LAYOUTS = [("thd", False), ("thd", True), ("bshd", False), ("bshd", True)]


def one_rank(run, tensor_size, context_size):
    """In each process."""
    on_the_cpu()
    set_parallel_groups(tensor=tensor_size, context=context_size)
    return step(run, local_data(run), logits_of())


def local_data(run):
    """As Miles's trainer holds it: lists of tensors, the per-token ones sliced by its own context parallelism."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
    from miles.backends.training_utils.parallel import get_parallel_state

    data = rollout_data()
    longest = -(-max(TOTAL) // 16) * 16
    lengths = [longest] * len(TOTAL) if run.qkv_format == "bshd" else None
    held = {**data, "max_seq_lens": lengths}
    held["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
    held["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
    for key in ("rollout_log_probs", "ref_log_probs", "advantages"):
        whole = [torch.tensor(values, dtype=torch.float32) for values in data[key]]
        if get_parallel_state().cp.size > 1:
            whole = [
                slice_log_prob_with_cp(values, TOTAL[i], RESPONSE[i], run.qkv_format, longest) for i, values in enumerate(whole)
            ]
        held[key] = whole
    held["rollout_mask_sums"] = torch.stack([mask.sum() for mask in held["loss_masks"]]).float()
    return held


CASES = [
    *((qkv, gather, 2, 2, {}) for qkv, gather in LAYOUTS),
    *((qkv, gather, 2, 2, {"calculate_per_token_loss": False, "score_centering_is": "tis"}) for qkv, gather in LAYOUTS),
    ("thd", False, 1, 1, {"score_centering_is": "mis", "rollout_temperature": 0.7}),
    ("bshd", False, 1, 1, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "entropy_coef": 0.01}),
    ("thd", True, 1, 3, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"}),
    ("thd", False, 2, 2, {"recompute_loss_function": True}),
]


@pytest.mark.parametrize(
    ("qkv_format", "allgather_cp", "tensor_size", "context_size", "changes"),
    CASES,
    ids=[f"{q}-{'gather' if g else 'zigzag'}-tp{t}cp{c}-{'-'.join(map(str, o)) or 'plain'}" for q, g, t, c, o in CASES],
)
def test_a_step_of_miles_is_the_inner_rings(tmp_path, qkv_format, allgather_cp, tensor_size, context_size, changes):
    run = run_of(
        **{
            "qkv_format": qkv_format, "allgather_cp": allgather_cp, "calculate_per_token_loss": True, "vocab_size": VOCAB,
            "data_pad_size_multiplier": PAD_MULTIPLIER,
        } | changes
    )  # fmt: skip
    loss, gradients, metrics = inner_ring(run, rollout_data(), logits_of())
    results = launch(one_rank, tensor_size * context_size, tmp_path, run, tensor_size, context_size)

    # tensor-parallel ranks hold columns, context-parallel ranks rows; each of the latter a share of the loss
    shares = [results[c * tensor_size][0] for c in range(context_size)]
    torch.testing.assert_close(sum(shares).double(), loss, rtol=1e-6, atol=1e-6)
    for i, expected in enumerate(gradients):
        whole = sum(result[1][i] for result in results)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
        assert not whole[:, VOCAB:].any()

    logged = results[0][2]
    count = sum(RESPONSE) - 2 if run.calculate_per_token_loss else len(RESPONSE)
    assert logged["loss"] == pytest.approx(float(loss) / count, rel=1e-5)
    masks = [torch.tensor(mask) > 0 for mask in rollout_data()["loss_masks"]]
    masses = torch.cat([own["sc_train_head_mass"][mask] for own, mask in zip(metrics, masks, strict=True)])
    assert logged["sc_train_head_mass_min"] == pytest.approx(float(masses.min()), rel=1e-5)
    if run.calculate_per_token_loss:
        assert logged["sc_train_head_mass"] == pytest.approx(float(masses.mean()), rel=1e-5)
    assert all(result[2] == pytest.approx(logged, rel=1e-5) for result in results)


# --- whose loss it is


def dispatched(**changes):
    from miles.backends.training_utils.loss_hub import losses

    return losses.get_loss_function(run_of(**changes)), losses.get_loss_function.__wrapped__


@pytest.mark.parametrize("loss_type", ["policy_loss", "value_loss"])
def test_other_losses_are_the_hosts(loss_type):
    found, plain = dispatched(loss_type=loss_type)
    assert found is plain(run_of(loss_type=loss_type))


def test_a_critic_is_not_observed():
    """Its actor sets the loss, and its logits have one column."""
    found, plain = dispatched(loss_type="value_loss", score_centering_observe=True)
    assert found is plain(run_of(loss_type="value_loss"))
    observed, plain = dispatched(loss_type="policy_loss", score_centering_observe=True)
    assert observed is not plain(run_of(loss_type="policy_loss"))


def one_takeover(run, provider):
    """On a Miles that says it has the loss itself: what its dispatch gives, and what that says of a broken token."""
    on_the_cpu()
    set_parallel_groups(tensor=1, context=1)
    from miles.backends.training_utils.loss_hub import losses

    activation("miles").own_loss = True
    run.score_centering_provider = provider
    if provider == "host":
        with pytest.raises(ValueError, match="Unknown loss type"):  # as this Miles has none
            losses.get_loss_function(run)
        return None
    data, tables = local_data(run), logits_of()
    data["advantages"][1][0] = float("nan")
    with pytest.raises(ValueError, match="sample 8, response token 0.*Nothing was updated"):
        step(run, data, tables)
    return step(run, local_data(run), tables)[0]


@pytest.mark.parametrize("provider", ["host", "miles_sc"])
def test_a_takeover_exchanges_the_loss_where_it_is_asked_for(tmp_path, provider):
    run = run_of(calculate_per_token_loss=True, vocab_size=VOCAB, data_pad_size_multiplier=PAD_MULTIPLIER)
    (loss,) = launch(one_takeover, 1, tmp_path, run, provider)
    if provider == "miles_sc":
        torch.testing.assert_close(loss.double(), inner_ring(run, rollout_data(), logits_of())[0], rtol=1e-6, atol=1e-6)
