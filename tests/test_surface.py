"""The public surface as it is promised, and imports that point inward only."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import miles_sc
import miles_sc.rollout

PACKAGE = Path(miles_sc.__file__).parent

CALLS = {  # call, its leading parameters, the keyword-only ones with their defaults
    miles_sc.score_centering_loss: (
        ["inputs"],
        {"importance_sampling": "none", "tis_clip": 2.0, "mis_low": 0.5, "mis_high": 5.0},
    ),
    miles_sc.selected_log_probs: (
        ["logits", "token_ids"],
        {"group": None, "vocab_size": None, "temperature": 1.0, "chunk_size": -1, "inplace_backward": False},
    ),
    miles_sc.linear_selected_log_probs: (
        ["hidden", "weight", "token_ids"],
        {"group": None, "vocab_size": None, "temperature": 1.0, "chunk_size": -1},
    ),
    miles_sc.support_log_probs: (["logits", "token_ids"], {"group": None, "vocab_size": None, "temperature": 1.0}),
    miles_sc.rollout.configure_request: (["config", "request"], {"openai": False, "evaluation": False}),
    miles_sc.rollout.append_candidates: (
        ["sample", "meta_info"],
        {"k": inspect.Parameter.empty, "mode": "selected", "vocab_size": None},
    ),
}
VALUES = {  # dataclass, its fields in order with their defaults
    miles_sc.ScoreCenteringInputs: {
        "train_log_probs": ...,
        "train_head_log_probs": ...,
        "rollout_log_probs": ...,
        "rollout_head_log_probs": ...,
        "head_mask": ...,
        "advantages": ...,
        "active": None,
        "complete_head": False,
    },
    miles_sc.ScoreCenteringConfig: {
        "top_logprobs_num": 0,
        "importance_sampling": "none",
        "tis_clip": 2.0,
        "mis_low": 0.5,
        "mis_high": 5.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
    },
    miles_sc.Candidates: {"token_ids": ..., "log_probs": ...},
}
SAMPLE = (
    "tokens",
    "response_length",
    "loss_mask",
    "rollout_log_probs",
    "rollout_topk_token_ids",
    "rollout_topk_log_probs",
    "rollout_sampling_mask",
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls(call):
    leading, keywords = CALLS[call]
    parameters = inspect.signature(call).parameters
    assert list(parameters)[: len(leading)] == leading
    for name, default in keywords.items():
        assert (parameters[name].kind, parameters[name].default) == (inspect.Parameter.KEYWORD_ONLY, default), name
    for parameter in parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
        assert parameter.name in leading or parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert call.__doc__


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_values_are_frozen_and_hold_these_fields(value):
    fields = {f.name: ... if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(value)}
    assert fields == VALUES[value]
    assert value.__dataclass_params__.frozen


def test_a_fresh_sample_needs_its_prompt_only():
    sample = miles_sc.rollout.Sample(tokens=[1, 2])
    assert [getattr(sample, name) for name in SAMPLE] == [[1, 2], 0, None, None, None, None, None]


def test_candidates_and_config_have_their_methods():
    assert all(callable(getattr(miles_sc.Candidates, name)) for name in ("append_gap", "trim", "concatenate", "validate"))
    assert callable(miles_sc.ScoreCenteringConfig.from_args) and miles_sc.ScoreCenteringConfig().mode == "selected"


@pytest.mark.parametrize("module", [miles_sc, miles_sc.rollout])
def test_everything_exported_is_there_and_documented(module):
    assert all(getattr(module, name).__doc__ for name in module.__all__)


HEAVY = ("ray", "transformers", "sglang", "megatron", "fastapi", "httpx", "rich", "reasoning_gym", "matplotlib", "tensorboard")


def test_the_import_is_light():
    script = f"import miles_sc, miles_sc.rollout, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# --- rings


RINGS = [  # what stands in a ring may import from its own and from those before it
    {"loss", "parallel", "config", "candidates", "sampling_support"},
    {"arguments", "rollout", "data", "backends"},
    {"trainer", "hosts", "cli", "doctor"},
]
LIGHT = {"torch", "numpy"}
WIRE = {"orjson", "pybase64"}  # of those who read an answer
SERVERS = ("rollout.engines", "rollout.session")  # whose libraries come with extras


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path):
    """Absolute names of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def ring(module):
    (number,) = [i for i, names in enumerate(RINGS) if module.split(".")[0] in names]
    return number


@pytest.mark.parametrize(("module", "path"), [pair for pair in modules() if pair[0]], ids=lambda value: str(value)[-60:])
def test_imports_point_inward(module, path):
    ours = [name.removeprefix("miles_sc.") for name in imports(path) if name.startswith("miles_sc.")]
    outward = [name for name in ours if ring(name) > ring(module)]
    assert not outward
    if ring(module) < 2:
        # what lies between the rings: neither knows how an engine is run
        assert not [name for name in ours if name.startswith("rollout.engines")] or module.startswith("rollout")


@pytest.mark.parametrize(
    ("module", "path"),
    [
        (module, path)
        for module, path in modules()
        if not module or ring(module) == 0 or module.startswith(("data", "rollout")) and not module.startswith(SERVERS)
    ],
    ids=lambda value: str(value)[-60:],
)
def test_the_core_needs_torch_and_numpy_alone(module, path):
    # Triton comes with torch where there is CUDA, and is asked for there only
    allowed = LIGHT | {"miles_sc"} | ({"triton"} if module == "loss.triton_scoring" else set())
    allowed |= WIRE if module.startswith("rollout") else set()
    foreign = {name.split(".")[0] for name in imports(path)} - allowed - sys.stdlib_module_names
    assert not foreign


@pytest.mark.parametrize(
    ("module", "path"), [pair for pair in modules() if pair[0] and ring(pair[0]) == 0], ids=lambda value: str(value)[-60:]
)
def test_the_inner_ring_is_tensors_in_tensors_out(module, path):
    """No host, no server, no Ray, no argparse."""
    names = {name for name in imports(path)}
    assert not names & {"argparse", "os", "socket", "subprocess"}
    ours = {name for name in names if name.startswith("miles_sc.")}
    assert all(name.startswith(("miles_sc.loss", "miles_sc.config", "miles_sc.parallel")) for name in ours)
