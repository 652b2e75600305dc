"""Weight updates of the embedded engine: strict, read-only towards their input, versioned."""

import numpy as np
import pytest
import torch

pytest.importorskip("pybase64")
pytest.importorskip("transformers")

from tests.rollout.tiny_model import body, build_engine, build_model  # noqa: E402

PROMPT = body(top=8, params={"sampling_seed": 1})


def random_state(model, seed=1):
    """Read-only arrays, as an object store hands them out."""
    rng = np.random.default_rng(seed)
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = rng.normal(scale=0.3, size=parameter.shape).astype(np.float32)
        state[name].flags.writeable = False
    return state


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_are_those_sampled_from_and_reported(dtype, recwarn):
    model = build_model().to(dtype)
    state = random_state(model)
    before = {name: values.copy() for name, values in state.items()}
    engine = build_engine(model)
    (old,) = engine.generate([PROMPT])
    engine.update_weights(state, "7")
    (new,) = engine.generate([PROMPT])
    assert old["meta_info"]["weight_version"] == "default" and new["meta_info"]["weight_version"] == "7"
    assert new["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 6}]
    fresh = build_model().to(dtype)
    fresh.load_state_dict({name: torch.tensor(values) for name, values in state.items()}, strict=False)
    (expected,) = build_engine(fresh).generate([PROMPT])
    assert new["meta_info"]["output_top_logprobs"] == expected["meta_info"]["output_top_logprobs"]
    assert all(np.array_equal(before[name], values) for name, values in state.items())
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


def test_later_writes_to_the_input_do_not_reach_the_model():
    model = build_model()
    state = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    engine = build_engine(model)
    engine.update_weights(state, "1")
    for values in state.values():
        values.fill_(9.0)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def drop(state):
    del state["model.norm.weight"]


def add(state):
    state["model.extra.weight"] = np.zeros(3, np.float32)


def reshape(state):
    state["model.norm.weight"] = np.zeros(31, np.float32)


def broadcastable(state):
    state["model.norm.weight"] = np.zeros(1, np.float32)


def integers(state):
    state["model.norm.weight"] = np.zeros(32, np.int32)


def plain_list(state):
    state["model.norm.weight"] = [0.0] * 32


def differing_tie(state):
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, r"missing model\.norm\.weight, unexpected none; send"),
        (add, r"missing none, unexpected model\.extra\.weight; send"),
        (reshape, r"model\.norm\.weight has shape \[31\], the model's is \[32\]; send"),
        (broadcastable, r"model\.norm\.weight has shape \[1\]"),
        (integers, r"model\.norm\.weight has dtype int32, the model's is torch\.float32; send"),
        (plain_list, r"model\.norm\.weight is a list; send"),
        (differing_tie, r"(lm_head|embed_tokens)\.weight .*are tied in the model but differ.*send one"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(spoil, message):
    model = build_model()
    state = random_state(model)
    spoil(state)
    before = weights_of(model)
    engine = build_engine(model)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(state, "2")
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert engine.weight_version == "default"


def test_tied_weights_may_come_under_either_name_or_both():
    model = build_model()
    engine = build_engine(model)
    state = random_state(model)
    tied = state.pop("model.embed_tokens.weight")
    for names in (("model.embed_tokens.weight",), ("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")):
        model.get_input_embeddings().weight.data.zero_()
        engine.update_weights({**state, **{name: tied for name in names}}, "3")
        assert np.array_equal(model.lm_head.weight.detach().numpy(), tied)
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_untied_models_need_the_head_too():
    model = build_model(tie_word_embeddings=False)
    state = random_state(model)
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        build_engine(model).update_weights(state, "4")


@pytest.mark.parametrize("version", ["", 3, None])
def test_a_version_is_a_name(version):
    model = build_model()
    with pytest.raises(ValueError, match="version="):
        build_engine(model).update_weights(random_state(model), version)
