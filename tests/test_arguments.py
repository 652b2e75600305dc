"""The flags, the config they become and the start-up contract."""

import argparse
import dataclasses

import pytest

from miles_sc import ScoreCenteringConfig
from miles_sc.arguments import (
    ORIGINAL_LOGPROB_VARIABLE,
    add_score_centering_arguments,
    validate_score_centering_arguments,
)

NAN, INF = float("nan"), float("inf")


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_score_centering_arguments(parser)
    return parser.parse_args(flags)


def host(**values):
    """A launch with the loss on, as a host's namespace holds it."""
    given = {"loss_type": "score_centering", "rollout_top_logprobs_num": 8, "advantage_estimator": "grpo", **values}
    return argparse.Namespace(**{**vars(parse()), **given})


def test_flags_have_the_known_names_types_and_defaults():
    assert vars(parse()) == {
        "rollout_top_logprobs_num": 0,
        "score_centering_is": "none",
        "score_centering_tis_clip": 2.0,
        "score_centering_mis_low": 0.5,
        "score_centering_mis_high": 5.0,
        "score_centering_observe": False,
    }
    line = "--rollout-top-logprobs-num 128 --score-centering-is mis --score-centering-tis-clip 3 --score-centering-mis-low 0.1 "
    line += "--score-centering-mis-high 7 --score-centering-observe"
    assert list(vars(parse(*line.split())).values()) == [128, "mis", 3.0, 0.1, 7.0, True]


def test_an_unknown_weight_function_is_no_choice(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--score-centering-is", "icepop")
    assert "choose from" in capsys.readouterr().err


def test_config_reads_a_namespace_once():
    args = host(
        score_centering_is="tis",
        score_centering_tis_clip=3.0,
        score_centering_mis_low=0.1,
        score_centering_mis_high=7.0,
        rollout_temperature=0.7,
        rollout_top_p=0.9,
        rollout_top_k=4,
    )
    config = ScoreCenteringConfig.from_args(args)
    assert dataclasses.astuple(config) == (8, "tis", 3.0, 0.1, 7.0, 0.7, 0.9, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 5
    assert config.estimator_settings == {"importance_sampling": "tis", "tis_clip": 3.0, "mis_low": 0.1, "mis_high": 7.0}


def test_what_a_namespace_lacks_has_its_default():
    assert ScoreCenteringConfig.from_args(argparse.Namespace()) == ScoreCenteringConfig()


@pytest.mark.parametrize(
    ("top_p", "top_k", "mode"), [(1.0, -1, "selected"), (0.9, 8, "support"), (1.0, 8, "support"), (1, 1, "support")]
)
def test_mode_follows_from_the_sampler(top_p, top_k, mode):
    assert ScoreCenteringConfig(top_logprobs_num=8, top_p=top_p, top_k=top_k).mode == mode


REFUSED = [  # values, what the message must say
    ({"rollout_top_logprobs_num": -1}, "--rollout-top-logprobs-num -1: set a whole number of at least 0"),
    ({"rollout_top_logprobs_num": 2.5}, "--rollout-top-logprobs-num 2.5: set a whole number"),
    ({"rollout_top_logprobs_num": "8"}, "--rollout-top-logprobs-num '8': set a whole number"),
    ({"rollout_top_logprobs_num": True}, "--rollout-top-logprobs-num True: set a whole number"),
    ({"score_centering_is": "icepop"}, "--score-centering-is icepop: choose one of none, tis, mis"),
    *(
        ({"score_centering_tis_clip": value}, f"--score-centering-tis-clip {value}: set a finite number above 0")
        for value in (0.0, -1.0, NAN, INF, None, "2")
    ),
    *(
        (
            {"score_centering_mis_low": low, "score_centering_mis_high": high},
            f"--score-centering-mis-low {low} --score-centering-mis-high {high}: set finite numbers with 0 < low <= high",
        )
        for low, high in ((0.0, 5.0), (-1.0, 5.0), (2.0, 1.0), (NAN, 5.0), (0.5, INF), (0.5, NAN), ("a", 5.0))
    ),
    *(
        ({"rollout_temperature": value}, f"--rollout-temperature {value}: set a finite number above 0")
        for value in (0, 0.0, -1.0, NAN, INF)
    ),
    *(
        ({"rollout_top_p": value, "rollout_top_k": 4}, f"--rollout-top-p {value}: set a number in (0, 1]")
        for value in (0.0, -0.5, 1.5, NAN)
    ),
    ({"rollout_top_k": 0}, "--rollout-top-k 0: set -1 for no limit, or a positive count"),
    ({"rollout_top_k": -2}, "--rollout-top-k -2: set a whole number of at least -1"),
    ({"rollout_top_k": 4.0}, "--rollout-top-k 4.0: set a whole number"),
    ({"rollout_top_p": 0.9}, "--rollout-top-p 0.9 without --rollout-top-k: .*set a positive --rollout-top-k"),
    ({"rollout_top_k": 16}, "--rollout-top-logprobs-num 8 is smaller than --rollout-top-k 16: .*to at least 16"),
    (
        {"rollout_top_logprobs_num": 0},
        "--loss-type score_centering with --rollout-top-logprobs-num 0: set the number of candidates",
    ),
    (
        {"advantage_estimator": "gae"},
        "--advantage-estimator gae with --loss-type score_centering: .*set --advantage-estimator grpo",
    ),
    ({"use_tis": True}, "--use-tis .*= True.* with --loss-type score_centering: .*--score-centering-is tis"),
    ({"custom_tis_function_path": "m.f"}, "--custom-tis-function-path .*= m.f.*use --score-centering-is"),
    ({"use_opsm": True}, "--use-opsm .*leave it out"),
    ({"true_on_policy_mode": True}, "--true-on-policy-mode .*leave one of the two out"),
    ({"recompute_logprobs_via_prefill": True}, "--recompute-logprobs-via-prefill .*leave it out"),
    ({"use_opd": True}, "--use-opd .*leave it out"),
    ({"multi_lora": True}, "--multi-lora-n-adapters .*leave it out"),
    ({"custom_pg_loss_reducer_function_path": "m.f"}, "--custom-pg-loss-reducer-function-path .*= m.f.*leave it out"),
    ({"custom_convert_samples_to_train_data_path": "m.f"}, "--custom-convert-samples-to-train-data-path .*= m.f"),
    ({"sglang_speculative_algorithm": "EAGLE"}, "--sglang-speculative-algorithm .*= EAGLE.*leave it out"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_refusal_names_flag_value_and_remedy(values, message):
    message = message.replace("(0, 1]", r"\(0, 1\]")
    with pytest.raises(ValueError, match=message):
        validate_score_centering_arguments(host(**values), environment={})


def test_a_launch_that_keeps_the_contract_passes():
    """What the refusals start from is whole; absent and false host features are no conflict."""
    validate_score_centering_arguments(host(use_tis=False, custom_tis_function_path=None), environment={})
    validate_score_centering_arguments(host(rollout_top_k=8, rollout_top_p=0.9), environment={"OTHER": "1"})


@pytest.mark.parametrize("value", ["1", "true", "True", "TRUE", " yes ", "y", "on"])
@pytest.mark.parametrize("values", [{}, {"loss_type": "policy_loss", "score_centering_observe": True}])
def test_engines_must_not_inherit_untempered_log_probs(value, values):
    with pytest.raises(ValueError, match=f"{ORIGINAL_LOGPROB_VARIABLE}={value} in the environment: .*unset it or set it to 0"):
        validate_score_centering_arguments(host(**values), environment={ORIGINAL_LOGPROB_VARIABLE: value})


@pytest.mark.parametrize("value", ["", "0", "false", "no", "off"])
def test_the_variable_may_be_off(value):
    assert validate_score_centering_arguments(host(), environment={ORIGINAL_LOGPROB_VARIABLE: value}) is None


def test_the_variable_is_read_from_the_process(monkeypatch):
    monkeypatch.setenv(ORIGINAL_LOGPROB_VARIABLE, "1")
    with pytest.raises(ValueError, match=ORIGINAL_LOGPROB_VARIABLE):
        validate_score_centering_arguments(host())


@pytest.mark.parametrize("values", [values for values, _ in REFUSED if "rollout_top_logprobs_num" not in values])
def test_off_a_hosts_launch_is_its_own_affair(values):
    """Without the feature nothing changes for a host, whatever it asks of its sampler or of other features."""
    off = host(**{**values, "loss_type": "policy_loss", "rollout_top_logprobs_num": 0})
    before = dict(vars(off))
    validate_score_centering_arguments(off, environment={ORIGINAL_LOGPROB_VARIABLE: "1"})
    assert vars(off) == before
    with pytest.raises(ValueError):
        validate_score_centering_arguments(host(**values), environment={})


def test_observing_needs_candidates_but_not_the_losss_recipe():
    observing = {"loss_type": "policy_loss", "score_centering_observe": True, "use_tis": True, "advantage_estimator": "gae"}
    validate_score_centering_arguments(host(**observing), environment={})
    with pytest.raises(ValueError, match="--score-centering-observe with --rollout-top-logprobs-num 0: set the number"):
        validate_score_centering_arguments(host(**observing, rollout_top_logprobs_num=0), environment={})


@pytest.mark.parametrize(("k", "vocab", "ok"), [(8, 8, True), (8, 7, False)])
def test_k_fits_the_vocabulary(k, vocab, ok):
    config = ScoreCenteringConfig(top_logprobs_num=k)
    if ok:
        assert config.check_vocabulary(vocab) is None
    else:
        with pytest.raises(
            ValueError, match="--rollout-top-logprobs-num 8 exceeds the model's vocabulary of 7: set it to at most 7"
        ):
            config.check_vocabulary(vocab)
