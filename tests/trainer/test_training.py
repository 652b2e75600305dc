"""The whole pipeline on real Ray actors: rollout, conversion, sharding, training, weight update, evaluation."""

import pytest

from tests.conftest import TRAINED, without_times

CENTERED = ["--loss-type", "score_centering", "--rollout-top-logprobs-num", "32", *TRAINED]
CONTRACT_METRICS = (
    "sc_correction", "sc_train_head_mass", "sc_rollout_head_mass", "sc_tail_ratio", "sc_importance_weight",
    "train_rollout_logprob_abs_diff", "train_rollout_kl", "kl_invalid_fraction", "loss", "pg_loss", "entropy_loss", "kl_loss",
    "sc_sampled_in_head", "sc_coefficient_l1", "sc_tail_floor_fraction", "sc_weight_clipped_fraction", "sc_ess",
)  # fmt: skip


def test_every_metric_of_the_contract_is_recorded(alone, run):
    records = run(alone, *CENTERED, "--entropy-coef", "0.01", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")
    assert [record["step"] for record in records] == [-1, 0, 1]
    for name in CONTRACT_METRICS:
        assert f"train/{name}" in records[-1], name
    assert records[0]["eval/kl_from_start"] == 0
    # the first step's policy is the reference
    assert records[1]["train/kl_loss"] == 0 and records[2]["train/kl_loss"] > 0
    assert records[2]["eval/kl_from_start"] > 0


def test_a_sampler_without_mismatch_reports_the_trainers_distribution(alone, run):
    exact = run(alone, *CENTERED, "--rollout-mismatch", "none", name="exact")[1]
    assert exact["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert exact["train/sc_coefficient_l1"] < 1e-4
    noisy = run(alone, *CENTERED, "--rollout-mismatch", "int4", name="int4")[1]
    assert noisy["train/train_rollout_logprob_abs_diff_max"] > 1e-3


def test_staleness_shows_as_drift_only_once_weights_have_moved(alone, run):
    records = run(alone, *CENTERED, "--rollout-mismatch", "none", "--rollout-staleness", "2", "--num-rollout", "3")
    drift = [record["train/train_rollout_logprob_abs_diff"] for record in records[1:]]
    assert drift[0] < 1e-5 and drift[2] > drift[1] > 10 * drift[0]


@pytest.mark.parametrize("loss", [["--loss-type", "policy_loss", "--use-tis"], [*CENTERED, "--score-centering-is", "mis"]])
@pytest.mark.parametrize("reduction", [[], ["--calculate-per-token-loss"]])
def test_two_ranks_train_as_one(alone, pair, run, loss, reduction):
    flags = [*loss, *reduction, "--num-steps-per-rollout", "2", "--lr", "1e-4"]
    one, two = run(alone, *flags, name="one")[1:], run(pair, *flags, "--actor-num-gpus-per-node", "2", name="two")[1:]
    assert all(record["train/grad_norm"] > 0 for record in one), "nothing was trained, so nothing was compared"
    for a, b in zip(one, two, strict=True):
        assert a["rollout/reward"] == b["rollout/reward"]
        for name in ("train/loss", "train/grad_norm", "train/train_rollout_kl"):
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=2e-6), name
    assert one[-1]["eval/kl_from_start"] == pytest.approx(two[-1]["eval/kl_from_start"], rel=1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        [*CENTERED, "--rollout-staleness", "1", "--num-steps-per-rollout", "2"],
        ["--loss-type", "policy_loss", "--optimizer", "sgd", "--lr", "0.1"],
    ],
)
def test_resuming_continues_to_the_bit(alone, run, tmp_path, flags):
    whole = run(alone, *flags, "--num-rollout", "4", name="whole")
    run(alone, *flags, "--num-rollout", "2", name="halves")
    halves = run(alone, *flags, "--num-rollout", "4", "--load", str(tmp_path / "halves/checkpoints"), name="halves")
    assert without_times(halves) == without_times(whole)


def test_resuming_an_asynchronous_run_on_two_ranks_in_bf16(pair, run, tmp_path):
    flags = [*CENTERED, "--train-async", "--actor-num-gpus-per-node", "2", "--bf16", "--recompute-loss-function"]
    whole = run(pair, *flags, "--num-rollout", "4", name="whole")
    run(pair, *flags, "--num-rollout", "2", name="halves")
    halves = run(pair, *flags, "--num-rollout", "4", "--load", str(tmp_path / "halves/checkpoints"), name="halves")
    assert without_times(halves) == without_times(whole)


def test_resuming_under_other_settings_is_refused(alone, run, tmp_path):
    run(alone, *CENTERED, name="first")
    with pytest.raises(ValueError, match="--rollout-seed = 42 and this run has 7"):
        run(alone, *CENTERED, "--rollout-seed", "7", "--num-rollout", "3", "--load", str(tmp_path / "first/checkpoints"))
    with pytest.raises(ValueError, match="already holds 2 rollouts"):
        run(alone, *CENTERED, "--load", str(tmp_path / "first/checkpoints"))


def test_observing_leaves_the_policy_loss_as_it_is(alone, run):
    plain = without_times(run(alone, "--rollout-top-logprobs-num", "32", name="plain"))
    observed = without_times(run(alone, "--rollout-top-logprobs-num", "32", "--score-centering-observe", name="observed"))
    for a, b in zip(plain, observed, strict=True):
        assert a == {name: b[name] for name in a}
    assert "train/sc_tail_ratio" in observed[-1] and "train/sc_tail_ratio" not in plain[-1]


def test_recomputing_the_loss_changes_nothing(alone, run):
    kept, recomputed = run(alone, *CENTERED, name="kept"), run(alone, *CENTERED, "--recompute-loss-function", name="recomputed")
    assert without_times(kept) == without_times(recomputed)


def test_filtered_sampling_is_trained_over_its_support(alone, run):
    flags = [*CENTERED, "--rollout-top-k", "8", "--rollout-top-p", "0.9", "--rollout-top-logprobs-num", "16"]
    record = run(alone, *flags, "--use-kl-loss", "--kl-loss-coef", "0.1")[1]
    assert record["train/sc_train_head_mass_min"] == pytest.approx(1, abs=1e-5)
    assert record["train/sc_tail_ratio_max"] == 1 and record["train/sc_sampled_in_head"] == pytest.approx(1)
    assert record["train/kl_loss"] == 0


def test_a_constant_reward_with_rewards_as_they_are(alone, run):
    """The drift study's setting: every token has the same advantage, and the gradient is drift and noise."""
    flags = [*CENTERED, "--rm-type", "constant:-1", "--disable-rewards-normalization"]
    record = run(alone, *flags)[1]
    assert record["rollout/reward"] == -1 and record["train/grad_norm"] > 0


def test_the_trained_model_is_a_hugging_face_directory(alone, run, tmp_path):
    """What is written is the clean policy: training from it starts where the run ended."""
    ended = run(alone, *CENTERED, "--save-hf", str(tmp_path / "model"), name="first")[-1]
    started = run(alone, *CENTERED, "--hf-checkpoint", str(tmp_path / "model"), "--num-rollout", "1", name="second")[0]
    assert started["eval/reward"] == ended["eval/reward"] and ended["eval/kl_from_start"] > 0


def test_the_self_check_of_a_ci_run_passes(alone, run):
    assert without_times(run(alone, *CENTERED, name="plain")) == without_times(run(alone, *CENTERED, "--ci-test", name="checked"))


def test_tensorboard_events_are_written(alone, run, tmp_path):
    run(alone, *CENTERED, "--use-tensorboard")
    assert list((tmp_path / "run/tensorboard").glob("events*"))


@pytest.mark.parametrize("sampling", [[], ["--rollout-top-k", "16", "--rollout-top-p", "0.95"]])
def test_several_turns_train_on_what_the_policy_said_alone(alone, run, sampling):
    turns = ["--max-turns", "3", "--observation", " no: ", "--rollout-max-response-len", "16"]
    records = run(alone, *CENTERED, *turns, *sampling, "--rollout-mismatch", "none")[1:]
    assert all(1 < record["rollout/turns"] <= 3 for record in records)
    # observations are context for the trainer as they were for the sampler, so the two agree on every trained token
    assert records[0]["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert all(record["train/grad_norm"] > 0 for record in records)


def test_sampling_in_excess_keeps_what_is_left_for_the_next_rollout(alone, run):
    flags = ["--over-sampling-batch-size", "12", "--partial-rollout", "--num-rollout", "3", "--rollout-mismatch", "none"]
    records = run(alone, *CENTERED, *flags)[1:]
    # the embedded sampler completes everything: what is left over was sampled by the rollout before, with older weights
    assert records[0]["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    assert records[1]["train/train_rollout_logprob_abs_diff_max"] > 1e-4
    assert [record["rollout/mixed_versions_fraction"] for record in records] == [0, 0, 0]
