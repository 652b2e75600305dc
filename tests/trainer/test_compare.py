"""Arms of a comparison as command lines, and the runs that a command plans."""

import argparse

import pytest

from miles_sc.trainer.arguments import add_train_arguments, finish_train_arguments
from miles_sc.trainer.compare import arm_arguments, planned_runs


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    base = "--hf-checkpoint model --num-rollout 2 --rollout-batch-size 4 --task chain_sum --rollout-top-logprobs-num 64"
    args = parser.parse_args([*base.split(), *map(str, flags)])
    finish_train_arguments(args, parser)
    return args


def changed(args, own):
    return {name: value for name, value in vars(own).items() if getattr(args, name) != value}


BAND = ["--score-centering-mis-low", 0.6, "--score-centering-mis-high", 4]
CENTERED = {"loss_type": "score_centering"}
ARMS = {
    "policy_loss": {"rollout_top_logprobs_num": 0},
    "policy_loss@8": {"rollout_top_logprobs_num": 8},
    "tis": {"use_tis": True, "rollout_top_logprobs_num": 0},
    "mis": {"use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.6, "tis_clip": 4.0, "rollout_top_logprobs_num": 0},
    "score_centering": CENTERED,
    "score_centering@8": CENTERED | {"rollout_top_logprobs_num": 8},
    "score_centering+tis": CENTERED | {"score_centering_is": "tis"},
    "score_centering+mis@16": CENTERED | {"score_centering_is": "mis", "rollout_top_logprobs_num": 16},
    " score_centering ": CENTERED,
}


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_overrides_the_loss_and_nothing_else(arm):
    args = parse(*BAND)
    before = dict(vars(args))
    assert changed(args, arm_arguments(args, arm)) == ARMS[arm]
    assert vars(args) == before


@pytest.mark.parametrize("arm", ["policy_loss", "tis", "mis", "score_centering"])
def test_an_arm_is_the_same_whatever_loss_the_line_asked_for(arm):
    line = ["--loss-type", "score_centering", "--score-centering-is", "mis", *BAND]
    assert vars(arm_arguments(parse(*line), arm)) == vars(arm_arguments(parse(*BAND), arm))


def test_tis_keeps_the_lines_own_clip():
    own = arm_arguments(parse("--tis-clip", 1.3, "--tis-clip-low", 0.2, "--tis-mode", "mask"), "tis")
    assert (own.use_tis, own.tis_mode, own.tis_clip, own.tis_clip_low) == (True, "truncate", 1.3, 0.2)


@pytest.mark.parametrize("flags", [["--score-centering-observe"], ["--rollout-top-k", 8]])
def test_candidates_are_kept_where_somebody_reads_them(flags):
    args = parse(*flags)
    assert arm_arguments(args, "policy_loss").rollout_top_logprobs_num == 64
    assert arm_arguments(args, "score_centering").score_centering_observe is False


@pytest.mark.parametrize(
    "arm", ["", "grpo", "tis+mis", "score_centering+none", "score_centering@", "score_centering@-1", "Tis", "mis@4@5"]
)
def test_no_arm_lists_the_forms(arm):
    with pytest.raises(
        ValueError, match="--compare: .* is no arm; there are policy_loss, tis, mis, score_centering, .*@K"
    ) as error:
        arm_arguments(parse(), arm)
    assert repr(arm) in str(error.value)


def test_without_compare_there_is_one_run_in_the_output_directory(tmp_path):
    args = parse("--output-dir", tmp_path, "--loss-type", "score_centering")
    ((own, directory, title),) = planned_runs(args)
    assert own is args and directory.path == tmp_path and title == "score_centering"


def test_every_arm_under_every_seed(tmp_path):
    args = parse(
        "--output-dir", tmp_path, "--compare", "policy_loss, score_centering+tis@32", "--compare-seeds", 2, "--rollout-seed", 5
    )
    runs = planned_runs(args)
    names = ["policy_loss-seed5", "policy_loss-seed6", "score_centering-tis-k32-seed5", "score_centering-tis-k32-seed6"]
    assert [directory.path for _, directory, _ in runs] == [tmp_path / name for name in names]
    assert [own.output_dir for own, _, _ in runs] == [str(tmp_path / name) for name in names]
    assert [own.rollout_seed for own, _, _ in runs] == [5, 6, 5, 6]
    assert [title for _, _, title in runs][::2] == ["policy_loss, seed 5", "score_centering+tis@32, seed 5"]
    assert args.rollout_seed == 5 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--compare", "policy_loss,grpo"], "--compare: 'grpo' is no arm"),
        (["--compare", "policy_loss,"], "--compare: '' is no arm"),
        (["--compare", "tis,mis,tis"], "--compare tis,mis,tis: tis stands twice"),
        (["--compare", "policy_loss,score_centering@0"], "--rollout-top-logprobs-num 0: set the number of candidates"),
        (
            ["--compare", "score_centering@8", "--rollout-top-k", 16],
            "--rollout-top-logprobs-num 8 is smaller than --rollout-top-k 16",
        ),
        (["--compare", "tis", "--load", "x"], "--compare with --load, --save or --save-hf: each arm keeps its own"),
        (["--compare", "tis", "--save", "x"], "--compare with --load, --save or --save-hf"),
        (["--compare", "tis", "--save-hf", "x"], "--compare with --load, --save or --save-hf"),
    ],
)
def test_all_arms_are_checked_before_the_first_one_runs(flags, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        planned_runs(parse("--output-dir", tmp_path, *flags))
    assert not list(tmp_path.iterdir())
