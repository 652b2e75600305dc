"""Miles's own start: its command line, its engines' environment, its nodes, its seams."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import ray

from miles_sc.hosts import engines
from miles_sc.hosts.activation import activation
from tests.hosts.miles_host import RECIPE, needs_miles, parse, run_of

pytestmark = needs_miles


def test_every_seam_is_there_and_installed():
    """At the reference commit; what needs Miles's fork of Megatron is checked from its source."""
    for module in (
        "backends.fsdp_utils.actor", "backends.training_utils.loss", "ray.placement_group",
        "rollout.generate_hub.agentic_tool_call", "rollout.generate_hub.multi_turn", "rollout.sglang_rollout",
        "rollout.session.server", "rollout.session.v2.core",
    ):  # fmt: skip
        importlib.import_module(f"miles.{module}")

    active = activation("miles")
    active.require()
    touched = {seam.name for seam in active.seams if seam.wrap or seam.replace}
    assert touched - set(active.installed) <= {"miles.backends.megatron_utils.model.get_forward_backward_func"}


def test_the_recipe_parses():
    run = parse(*RECIPE)
    assert (run.loss_type, run.rollout_top_logprobs_num, run.score_centering_is) == ("score_centering", 4, "none")


def test_a_users_own_flags_are_still_found():
    """Miles parses once more inside its parser for them, and takes a failure for "none"."""
    run = parse(*RECIPE, "--custom-generate-function-path", "miles.rollout.generate_hub.multi_turn.generate",
                "--generate-max-turns", "3")  # fmt: skip
    assert run.generate_max_turns == 3


def test_without_the_flags_nothing_is_asked():
    run = parse()
    assert (run.loss_type, run.rollout_top_logprobs_num) == ("policy_loss", 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rollout-top-logprobs-num", "0"], "--rollout-top-logprobs-num 0: set the number of candidates"),
        (["--advantage-estimator", "gspo"], "only grpo is supported"),
        (["--use-tis"], "--use-tis (= True) with --loss-type score_centering"),
        (["--rollout-top-p", "0.9"], "--rollout-top-p 0.9 without --rollout-top-k"),
        (["--rollout-top-k", "4"], "this host's SGLang has no --sampling-mask-max-tokens"),
        (["--score-centering-mis-low", "9"], "--score-centering-mis-low 9.0"),
        (["--rollout-temperature", "0"], "--rollout-temperature 0"),
        (["--custom-convert-samples-to-train-data-path", "a.b"], "a foreign converter drops the candidates"),
        (["--sglang-speculative-algorithm", "EAGLE"], "--sglang-speculative-algorithm"),
        (["--loss-type", "policy_loss", "--score-centering-is", "tis", "--rollout-top-logprobs-num", "0"],
         "--score-centering-is tis with --loss-type policy_loss: nothing would read it"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_go_together_is_refused(flags, told):
    with pytest.raises(ValueError) as refused:
        parse(*RECIPE, *flags)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"loss_type": "score_centering"}, "--rollout-top-logprobs-num 0"),
        ({"loss_type": "score_centering", "rollout_top_logprobs_num": 8, "score_centering_is": "clip"}, "choose one of"),
        ({"loss_type": "score_centering", "rollout_top_logprobs_num": 8, "use_opsm": True}, "--use-opsm"),
        ({"rollout_top_logprobs_num": -1}, "--rollout-top-logprobs-num -1"),
    ],
)
def test_a_configuration_file_is_no_way_around(tmp_path, config, told):
    """It is applied behind argparse, late in Miles's own validation."""
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError) as refused:
        parse("--custom-config-path", str(path))
    assert told in str(refused.value)


def test_more_candidates_than_the_vocabulary_are_refused(model):
    with pytest.raises(ValueError, match="--rollout-top-logprobs-num 5000 exceeds the model's vocabulary"):
        parse(*RECIPE, "--rollout-top-logprobs-num", "5000", model=str(model))


def test_an_inactive_hook_fails_at_start():
    """The flag is then unknown to Miles, whose parser says so; nothing trains something else."""
    command = [sys.executable, "-c", "from miles.utils.arguments import parse_args; parse_args()", "--train-backend", "fsdp"]
    environment = {**os.environ, "MILES_SC_HOSTS": "off"}
    done = subprocess.run([*command, *RECIPE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "invalid choice: 'score_centering'" in done.stderr


def test_engines_keep_the_temperature():
    from miles.utils import dumper_utils

    run = run_of(dumper_enable=False)
    assert dumper_utils.get_sglang_env(run) == {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    run.rollout_top_logprobs_num = 0
    assert dumper_utils.get_sglang_env(run) == {}


def test_engines_are_asked_through_the_router_once_they_are_up(engine, model):
    """Where the rollout manager has started them; one that degrades stops the run there."""
    from urllib.parse import urlsplit

    from miles.ray.rollout.router_manager import start_session_server

    address = urlsplit(engine.url)
    run = run_of(
        use_session_server=False, hf_checkpoint=str(model),
        sglang_router_ip=address.hostname, sglang_router_port=address.port,
    )  # fmt: skip
    start_session_server(run)
    run.rollout_top_k, run.rollout_top_p = 4, 0.9
    with pytest.raises(ValueError, match="does not deliver what training needs"):
        start_session_server(run)  # this SGLang reports no log-probs of a support


def test_ray_actors_of_miles_are_exported():
    """Ray pickles them by value, with the globals of their methods; those that we wrap go by name."""
    import miles.ray.rollout.rollout_manager as manager

    exported = ray.cloudpickle.dumps(manager.RolloutManager.__ray_metadata__.modified_class)
    assert b"convert_samples_to_train_data" in exported


def test_every_node_is_asked_before_anything_starts(ray_cluster, monkeypatch):
    (told,) = engines.ask_nodes("miles").values()
    assert told["watching"] and told["version"] and told["entered"]
    engines.check_nodes("miles")
    for spoiled, error in (
        ({"version": None}, "has no miles_sc in"),
        ({"version": "0.0.1"}, "has miles_sc 0.0.1, and here it is"),
        ({"watching": False}, "the start-up hook of miles_sc is off"),
        ({"entered": False, "error": "there is no such module"}, "it does not enter miles: there is no such module"),
    ):
        monkeypatch.setattr(engines, "ask_nodes", lambda host, spoiled=spoiled: {"far (10.0.0.7)": {**told, **spoiled}})
        with pytest.raises(ValueError, match=r"node far \(10.0.0.7\)") as refused:
            engines.check_nodes("miles")
        assert error in str(refused.value) and "nothing was started" in str(refused.value)
