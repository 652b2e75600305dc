"""Flags from ``--custom-config-path``."""

import importlib.util

import pytest

from tests.trainer.test_train_arguments import BASE, finish, parser_of_train


def with_yaml(tmp_path, text, *flags):
    path = tmp_path / "overrides.yaml"
    path.write_text(text)
    return finish(*(flags or BASE), "--custom-config-path", path)


def test_yaml_overrides_the_command_line(tmp_path):
    text = """
    loss_type: score_centering
    rollout-top-logprobs-num: 16
    --lr: 3.0e-4
    rollout_temperature: 1
    calculate_per_token_loss: true
    use_tis: false
    task_option: [min_terms=2, max_terms=3]
    eval_interval: 3.0
    save_interval: null
    """
    args = with_yaml(tmp_path, text, *BASE, "--lr", "1", "--use-tis", "--save-interval", "4")
    assert (args.loss_type, args.rollout_top_logprobs_num, args.lr) == ("score_centering", 16, 3e-4)
    assert (args.calculate_per_token_loss, args.use_tis) == (True, False)
    assert args.task_option == ["min_terms=2", "max_terms=3"] and args.save_interval is None
    assert isinstance(args.rollout_temperature, float) and isinstance(args.eval_interval, int) and args.eval_interval == 3


def test_a_value_of_another_type_is_refused_for_every_flag(tmp_path):
    for action in parser_of_train()._actions:
        if action.dest in ("help", "custom_config_path"):
            continue
        with pytest.raises(ValueError, match=f"overrides.yaml: {action.dest} = .*: give"):
            with_yaml(tmp_path, f"{action.dest}: {'7' if action.nargs == 0 else '[1]'}")


BAD_YAML = [  # text, message
    ("rollout_top_logprob_num: 3", "rollout_top_logprob_num is no flag; did you mean rollout_top_logprobs_num"),
    ("frobnicate: 3", r"frobnicate is no flag$"),
    ("help: true", "help is no flag"),
    ("custom_config_path: other.yaml", "custom_config_path is no flag"),
    ("num_rollout: 2.5", "num_rollout = 2.5: give a whole number"),
    ("num_rollout: '3'", "num_rollout = '3': give a whole number"),
    ("num_rollout: true", "num_rollout = True: give a whole number"),
    ("num_rollout: .inf", "num_rollout = inf: give a whole number"),
    ("num_rollout: .nan", "num_rollout = nan: give a whole number"),
    ("num_rollout: [1]", r"num_rollout = \[1\]: give a whole number"),
    ("num_rollout: null", "num_rollout is empty: the flag is required; give a value"),
    ("hf_checkpoint:", "hf_checkpoint is empty: the flag is required"),
    ("lr: 1e-6", "lr = '1e-6': give a number, with a dot before an exponent"),
    ("lr: .nan", "lr = nan: give a number"),
    ("use_kl_loss: 1", "use_kl_loss = 1: give true or false"),
    ("use_kl_loss: 'yes'", "use_kl_loss = 'yes': give true or false"),
    ("task: 3", "task = 3: give a text"),
    ("task: {name: chain_sum}", "task = .*: give a text"),
    ("task_option: min_terms=2", "task_option = 'min_terms=2': give a list of texts"),
    ("task_option: [2]", r"task_option = \[2\]: give a list of texts"),
    ("loss_type: sft_loss", "loss_type = 'sft_loss': choose one of policy_loss, score_centering"),
    ("kl_loss_type: k4", "kl_loss_type = 'k4': choose one of k1, k2, k3, low_var_kl"),
    ("- lr", "give a mapping of flags to values"),
    ("", "give a mapping of flags to values"),
    ("lr: [", "cannot be read as YAML: "),
    ("lr: !!python/object/apply:os.getcwd []", "cannot be read as YAML: "),
]


@pytest.mark.parametrize(("text", "message"), BAD_YAML)
def test_yaml_is_held_to_what_the_flags_ask(tmp_path, text, message):
    with pytest.raises(ValueError, match="--custom-config-path .*overrides.yaml: " + message) as error:
        with_yaml(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{loss_type: score_centering}", "--rollout-top-logprobs-num 0: set the number"),
        ("{loss_type: score_centering, rollout_top_logprobs_num: 8, use_tis: true}", "--use-tis .* with --loss-type"),
        ("{rollout_top_p: 0.5}", "--rollout-top-p 0.5 without --rollout-top-k"),
        ("{rollout_temperature: 0}", "--rollout-temperature 0.0: set"),
        ("{score_centering_tis_clip: .inf}", "--score-centering-tis-clip inf: set a finite number"),
        ("{context_parallel_size: 2}", "--context-parallel-size 2"),
        ("{global_batch_size: 7}", "optimizer steps of 7"),
        ("{task: null}", "give exactly one of --task and --prompt-data"),
        ("{rollout_mismatch: int3}", "--rollout-mismatch 'int3'"),
        ("{micro_batch_size: 0}", "--micro-batch-size 0: set at least 1"),
    ],
)
def test_no_illegal_combination_slips_past_through_yaml(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        with_yaml(tmp_path, text)


def test_megatron_without_megatron_core_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "megatron" else found(name, *args))
    with pytest.raises(ValueError, match="--train-backend megatron: megatron-core is not installed; pip install"):
        finish(*BASE, "--train-backend", "megatron")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00lr"])
def test_an_unreadable_yaml_file_is_named(tmp_path, content):
    path = tmp_path / "none.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="--custom-config-path .*none.yaml: cannot be read as YAML: "):
        finish(*BASE, "--custom-config-path", path)
