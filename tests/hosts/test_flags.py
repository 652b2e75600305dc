"""A stand-in host's command line with ours in it: who sees the flags when, and what is refused at start-up."""

import argparse
import json
import logging
import sys

import pytest

from miles_sc.arguments import ORIGINAL_LOGPROB_VARIABLE
from miles_sc.hosts import flags
from tests.hosts.stand_in_host import stand_in

LOSS = ("--loss-type", "score_centering", "--rollout-top-logprobs-num", "8")
OBSERVED = ("--score-centering-observe", "--rollout-top-logprobs-num", "8")
OFF = {
    "rollout_top_logprobs_num": 0,
    "score_centering_is": "none",
    "score_centering_tis_clip": 2.0,
    "score_centering_mis_low": 0.5,
    "score_centering_mis_high": 5.0,
    "score_centering_observe": False,
}


@pytest.fixture
def host(tmp_path):
    with stand_in(tmp_path) as host:
        yield host


@pytest.fixture
def parse(host, monkeypatch):
    """``parse(*words) -> namespace``, by the host's own command line, which is entered unless that was done before."""

    def parse(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        if f"{host.package}.arguments" not in sys.modules:
            host.enter_command_line()
        return host.load("arguments").parse_args()

    return parse


def overrides(tmp_path, **values) -> tuple[str, str]:
    path = tmp_path / "overrides.json"
    path.write_text(json.dumps(values))
    return "--custom-config-path", str(path)


# --- in the parser


def test_our_flags_are_read(parse):
    run = parse(*LOSS, "--score-centering-is", "mis", "--score-centering-mis-low", "0.25", "--batch-size", "4")
    assert (run.loss_type, run.rollout_top_logprobs_num, run.batch_size) == ("score_centering", 8, 4)
    assert (run.score_centering_is, run.score_centering_mis_low, run.score_centering_tis_clip) == ("mis", 0.25, 2.0)


def test_the_hosts_own_parse_within_its_provider_knows_them(parse, capsys):
    assert parse(*LOSS, "--users-flag", "mine", "--mine", "set").mine == "set"
    assert capsys.readouterr().err == ""


def test_without_us_the_same_line_is_refused(host, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *LOSS])
    with pytest.raises(SystemExit, match="2"):
        host.load("arguments").parse_args()
    assert capsys.readouterr().err.count("invalid choice: 'score_centering'") == 2  # the inner parse, then the outer


def test_a_value_that_is_no_choice_is_refused_still(parse, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--loss-type", "score_centring")
    assert "'policy_loss', 'sft_loss', 'score_centering'" in capsys.readouterr().err


def test_choices_are_widened_for_one_flag_and_while_the_provider_runs(host):
    host.enter_command_line()

    def custom(parser):
        assert vars(parser.parse_known_args([])[0]) == OFF  # ours come first
        parser.add_argument("--other-type", choices=["a"])
        return parser

    parser = argparse.ArgumentParser()
    assert host.load("arguments").get_extra_args_provider(custom)(parser) is parser
    assert "add_argument" not in vars(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    assert choices["loss_type"] == ["policy_loss", "sft_loss", "score_centering"] and choices["other_type"] == ["a"]
    other = argparse.ArgumentParser()
    assert other.add_argument("--loss-type", choices=["a"]).choices == ["a"]


def test_a_provider_that_fails_leaves_the_parser_as_it_was(host):
    host.enter_command_line()

    def custom(parser):
        raise RuntimeError("the user's own")

    parser = argparse.ArgumentParser()
    with pytest.raises(RuntimeError, match="the user's own"):
        host.load("arguments").get_extra_args_provider(custom)(parser)
    assert "add_argument" not in vars(parser)


def test_help_shows_them_in_a_group_of_their_own(host):
    host.enter_command_line()
    text = host.load("arguments").get_extra_args_provider()(argparse.ArgumentParser()).format_help()
    assert "score centering:" in text and all("--" + name.replace("_", "-") in text for name in OFF)


# --- off


def test_off_is_the_hosts_namespace_and_our_defaults(parse, tmp_path_factory):
    words = ("--batch-size", "4", "--rollout-top-p", "0.9", "--users-flag", "mine", "--mine", "set")
    ours = vars(parse(*words))
    with stand_in(tmp_path_factory.mktemp("plain")) as plain:
        assert ours == {**vars(plain.load("arguments").parse_args()), **OFF}


@pytest.mark.parametrize("words", [("--rollout-top-p", "0.9"), ("--rollout-temperature", "0"), ("--rollout-top-k", "0")])
def test_off_nothing_is_validated(parse, monkeypatch, tmp_path, words):
    monkeypatch.setenv(ORIGINAL_LOGPROB_VARIABLE, "1")
    (tmp_path / "config.json").write_text("damaged")
    parse(*words, "--hf-checkpoint", str(tmp_path))


def test_the_hosts_own_validation_stands_and_comes_first(parse):
    with pytest.raises(ValueError, match="^batch size$"):
        parse("--batch-size", "0", "--loss-type", "score_centering")


# --- what is refused


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (LOSS, {"rollout_top_logprobs_num": 0}, "--rollout-top-logprobs-num 0"),
        (LOSS, {"score_centering_tis_clip": -1}, "--score-centering-tis-clip -1"),
        (LOSS, {"advantage_estimator": "ppo"}, "--advantage-estimator ppo"),
        (LOSS, {"use_tis": True}, "--use-tis"),
        (LOSS, {"rollout_top_logprobs_num": "8"}, "--rollout-top-logprobs-num '8': set a whole number"),
        ((), {"loss_type": "score_centering"}, "--rollout-top-logprobs-num 0"),
        (OBSERVED, {"rollout_temperature": 0.0}, "--rollout-temperature 0.0"),
        ((), {"score_centering_is": "tis"}, "--score-centering-is tis"),
        (
            LOSS,
            {"score_centering_importance": "tis"},
            "score_centering_importance = 'tis': nothing reads it; .*score_centering_is",
        ),
        (LOSS, {"score-centering-is": "mis"}, "score-centering-is = 'mis': nothing reads it"),
        ((), {"score_centering_provider": "miles_sc"}, "score_centering_provider = 'miles_sc': nothing reads it"),
        ((), {"score_centering": True}, "score_centering = True: nothing reads it"),
        ((), {"rollout-top-logprobs-num": 8}, "rollout-top-logprobs-num = 8: nothing reads it; .*rollout_top_logprobs_num"),
        ((), {"score_centering_observe": "false"}, "score_centering_observe = 'false': set true or false"),
        (
            OBSERVED,
            {"use_opd": True, "opd_log_prob_top_k": 5},
            "--opd-log-prob-top-k 5 with --rollout-top-logprobs-num 8: both ask",
        ),
    ],
)
def test_a_file_of_overrides_cannot_slip_past(parse, tmp_path, words, values, message):
    with pytest.raises(ValueError, match=message):
        parse(*words, *overrides(tmp_path, **values))


def test_a_file_of_overrides_may_ask_for_the_loss(parse, tmp_path):
    run = parse(*overrides(tmp_path, loss_type="score_centering", rollout_top_logprobs_num=8))
    assert run.loss_type == "score_centering"


IDLE = [
    ("--score-centering-is", "tis"),
    ("--score-centering-tis-clip", "3.0"),
    ("--score-centering-mis-low", "0.1"),
    ("--score-centering-mis-high", "9.0"),
]


@pytest.mark.parametrize("recorded", [(), ("--rollout-top-logprobs-num", "8")], ids=["off", "recorded"])
@pytest.mark.parametrize("words", IDLE, ids=[words[0] for words in IDLE])
def test_flags_that_nothing_would_read_are_refused(parse, words, recorded):
    with pytest.raises(ValueError) as raised:
        parse(*words, *recorded)
    assert str(raised.value) == (
        f"{' '.join(words)} with --loss-type policy_loss: nothing would read it; "
        "set --loss-type score_centering or --score-centering-observe, or leave it out"
    )


@pytest.mark.parametrize("words", IDLE, ids=[words[0] for words in IDLE])
@pytest.mark.parametrize("asked", [LOSS, OBSERVED], ids=["trained", "observed"])
def test_they_are_read_where_the_loss_is_trained_or_observed(parse, words, asked):
    parse(*asked, *words)


@pytest.mark.parametrize(
    ("words", "values", "warning"),
    [
        ((), {}, None),
        (LOSS, {}, None),
        (OBSERVED, {}, None),
        (("--rollout-top-logprobs-num", "8"), {}, "candidates are recorded and no loss reads them"),
        (LOSS, {"train_backend": "megatron", "calculate_per_token_loss": True}, None),
        (LOSS, {"train_backend": "fsdp", "calculate_per_token_loss": True}, "does not divide such a loss by its tokens"),
    ],
)
def test_what_is_on_is_said_and_what_is_odd_warned_of(parse, caplog, tmp_path, words, values, warning):
    caplog.set_level(logging.INFO, logger=flags.__name__)
    parse(*words, *overrides(tmp_path, **values))
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO"] * bool(words) + ["WARNING"] * bool(warning)
    assert not words or "8 candidates per token, importance weights none" in lines[0][1]
    assert warning is None or warning in lines[1][1]


@pytest.mark.parametrize("config", [{"vocab_size": 300}, {"text_config": {"vocab_size": 300}}], ids=["flat", "nested"])
@pytest.mark.parametrize("count", [300, 301])
def test_more_candidates_than_the_model_has_tokens_are_refused(parse, tmp_path, config, count):
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--loss-type", "score_centering", "--rollout-top-logprobs-num", str(count), "--hf-checkpoint", str(tmp_path))
    if count <= 300:
        parse(*words)
        return
    with pytest.raises(ValueError, match="--rollout-top-logprobs-num 301 exceeds the model's vocabulary of 300: set it to at"):
        parse(*words)


@pytest.mark.parametrize("checkpoint", ["someone/some-model", "{folder}/gone", "{folder}"])
def test_a_model_that_is_not_here_is_not_asked(parse, tmp_path, checkpoint):
    parse(*LOSS, "--hf-checkpoint", checkpoint.format(folder=tmp_path))


def test_a_damaged_model_is_refused(parse, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is damaged"):
        parse(*LOSS, "--hf-checkpoint", str(tmp_path))


FILTERED = ("--rollout-top-p", "0.9", "--rollout-top-k", "6")


@pytest.mark.parametrize("values", [{"sglang_sampling_mask_max_tokens": 6}, {"rollout_external": True}], ids=str)
def test_filtered_sampling_passes_where_its_support_is_reported(parse, tmp_path, values):
    parse(*LOSS, *FILTERED, *overrides(tmp_path, **values))


@pytest.mark.parametrize(
    ("words", "values", "message"),
    [
        (FILTERED, {"sglang_sampling_mask_max_tokens": 5}, "--sglang-sampling-mask-max-tokens 5.*at least 6"),
        (FILTERED, {}, "cannot report the support.*SGLang 0.5.23 or newer"),
        (("--rollout-top-k", "6"), {"sglang_sampling_mask_max_tokens": None}, "cannot report the support"),
        (("--rollout-top-k", "9"), {"sglang_sampling_mask_max_tokens": 9}, "--rollout-top-logprobs-num to at least 9"),
        (("--rollout-top-p", "0.9"), {"rollout_external": True}, "positive --rollout-top-k"),
    ],
)
def test_filtered_sampling_is_refused_where_its_support_would_be_lost(parse, tmp_path, words, values, message):
    with pytest.raises(ValueError, match=message):
        parse(*LOSS, *words, *overrides(tmp_path, **values))


def test_a_run_that_asks_on_a_host_that_we_could_not_enter_is_refused(host):
    host.enter_command_line(host.seam("losses.gone"))
    off, asked = argparse.Namespace(**OFF), argparse.Namespace(**OFF, loss_type="score_centering")
    flags.check_run(off, package=host.package)
    with pytest.raises(ValueError, match=f"score centering cannot enter this {host.package}"):
        flags.check_run(asked, package=host.package)


# --- on a host with a loss of its own


@pytest.fixture
def takeover(host, monkeypatch):
    """``takeover(*words) -> namespace`` on a host that has the loss and its flags, but not which of the two trains."""
    source = host.directory / "arguments.py"
    ours = 'parser.add_argument("--rollout-top-logprobs-num", type=int, default=0)\n        parser.add_argument("--loss-type"'
    text = source.read_text().replace('parser.add_argument("--loss-type"', ours).replace('"sft_loss"', '"score_centering"')
    source.write_text(text)
    seams = (
        host.seam("arguments.get_extra_args_provider", wrap=flags.add_provider_flag),
        host.seam("arguments.validate_args", wrap=flags.check_takeover),
    )
    host.enter(own_loss="score_centering", takeover=(seams,))

    def takeover(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return host.load("arguments").parse_args()

    return takeover


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), []),
        (LOSS, ["this host has a score_centering loss of its own, which trains; "]),
        ((*LOSS, "--score-centering-provider", "miles_sc"), ["score_centering is trained by miles_sc "]),
    ],
    ids=["off", "the host's", "ours"],
)
def test_which_of_two_losses_trains_is_said(takeover, caplog, words, said):
    with caplog.at_level(logging.INFO, logger="miles_sc.hosts"):
        takeover(*words)
    assert [record.message[: len(text)] for record, text in zip(caplog.records, said, strict=True)] == said


def test_the_contract_is_ours_where_ours_trains(takeover):
    line = ("--loss-type", "score_centering", "--rollout-top-p", "0.9", "--rollout-top-k", "0")
    assert takeover(*line).score_centering_provider == "host"
    with pytest.raises(ValueError, match="--rollout-top-k 0"):
        takeover(*line, "--score-centering-provider", "miles_sc")


def test_a_provider_that_is_neither_is_refused():
    """Argparse would; a configuration file is read behind it."""
    run = argparse.Namespace(loss_type="score_centering", score_centering_provider="mine")

    def validate(args: argparse.Namespace) -> None:
        pass

    with pytest.raises(ValueError, match="--score-centering-provider mine: choose host or miles_sc"):
        flags.check_takeover(validate, None, (run,), {})
