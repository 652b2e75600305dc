"""The whole pipeline with the Megatron backend on two ranks: the same run as FSDP on one."""

import pytest

from tests.conftest import TRAINED, without_times

CENTERED = ["--loss-type", "score_centering", "--rollout-top-logprobs-num", "32", *TRAINED, "--lr", "1e-4"]
MEGATRON = ["--train-backend", "megatron"]
TENSOR = [*MEGATRON, "--tensor-model-parallel-size", "2"]
CONTEXT = [*MEGATRON, "--context-parallel-size", "2"]
REGULARIZED = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01"]
# its own old log-probs are scored before the step, row by row where they lie
POLICY = ["--loss-type", "policy_loss", "--use-tis", "--lr", "1e-4"]


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ([*TENSOR, "--ci-test"], [*CENTERED, *REGULARIZED]),
        ([*CONTEXT, "--qkv-format", "thd"], POLICY),
        ([*CONTEXT, "--qkv-format", "thd", "--allgather-cp"], [*CENTERED, "--rollout-top-k", "8", *REGULARIZED]),
        ([*MEGATRON, "--actor-num-gpus-per-node", "2", "--gradient-checkpointing"], [*CENTERED, "--recompute-loss-function"]),
    ],
)
def test_megatron_on_two_ranks_trains_as_fsdp_on_one(alone, pair, run, layout, loss):
    flags = [*loss, "--num-steps-per-rollout", "2"]
    one = run(alone, *flags, name="one")
    two = run(pair, *flags, *layout, name="two")
    assert all(record["train/grad_norm"] > 0 for record in one[1:]), "nothing was trained, so nothing was compared"
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert a.get("rollout/reward") == b.get("rollout/reward")
        for name in a:
            if name.startswith("train/") and not name.endswith("_p99"):
                assert a[name] == pytest.approx(b[name], rel=2e-3, abs=5e-6), name
    assert one[-1]["eval/kl_from_start"] == pytest.approx(two[-1]["eval/kl_from_start"], rel=2e-3)


@pytest.mark.parametrize("layout", [[*TENSOR, "--bf16"], [*CONTEXT, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "40"]])
def test_resuming_continues_to_the_bit(pair, run, tmp_path, layout):
    flags = [*CENTERED, *layout]
    whole = run(pair, *flags, "--num-rollout", "4", name="whole")
    run(pair, *flags, "--num-rollout", "2", name="halves")
    halves = run(pair, *flags, "--num-rollout", "4", "--load", str(tmp_path / "halves/checkpoints"), name="halves")
    assert without_times(halves) == without_times(whole)


def test_a_damaged_checkpoint_is_named(pair, run, tmp_path):
    run(pair, *CENTERED, *TENSOR, name="first")
    (damaged,) = tmp_path.glob("first/checkpoints/step_*/backend/tensor_1.pt")
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ValueError, match="tensor_1.pt cannot be read"):
        run(pair, *CENTERED, *TENSOR, "--num-rollout", "3", "--load", str(tmp_path / "first/checkpoints"), name="second")


def test_a_run_that_diverges_says_so(pair, run):
    with pytest.raises(ValueError, match="not finite|diverged|gradient norm"):
        run(pair, *CENTERED, *TENSOR, "--lr", "1e30", "--num-rollout", "3")
