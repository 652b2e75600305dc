"""How far the sampler's weights are made to differ, and that the difference is the one asked for."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("pybase64")
pytest.importorskip("transformers")

from miles_sc.rollout.engines.mismatch import fake_quantize, linear_weights, parse_mismatch  # noqa: E402
from tests.rollout.tiny_model import TRUE_VOCAB, body, build_engine, build_model  # noqa: E402


def state_of(model):
    return {name: parameter.detach().clone().numpy() for name, parameter in model.named_parameters()}


def reported_probs(engine):
    """float64 ``[vocabulary]`` of the first token."""
    (answer,) = engine.generate([body(top=TRUE_VOCAB, params={"max_new_tokens": 1})])
    (row,) = answer["meta_info"]["output_top_logprobs"]
    values, ids, _ = zip(*row, strict=True)
    probs = torch.zeros(TRUE_VOCAB, dtype=torch.float64)
    probs[list(ids)] = torch.tensor(values, dtype=torch.float64).exp()
    return probs


def total_variation(text, model):
    exact = reported_probs(build_engine(copy.deepcopy(model)))
    changed = reported_probs(build_engine(copy.deepcopy(model), mismatch=parse_mismatch(text)))
    return float((exact - changed).abs().sum()) / 2


@pytest.mark.parametrize(
    "text",
    ["", "int2", "INT8", "int8:1", "none:", "noise", "noise:", "noise:-0.1", "noise:0", "noise:nan", "noise:inf"],
)
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match=r"--rollout-mismatch .*none, int8, int4, noise:<sigma>") as error:
        parse_mismatch(text)
    assert repr(text) in str(error.value)


def test_each_form_changes_the_distribution_by_its_own_amount():
    model = build_model()
    distance = {text: total_variation(text, model) for text in ("int8", "int4", "noise:0.001", "noise:0.05")}
    assert 1e-4 < distance["int8"] < 0.05
    assert 4 * distance["int8"] < distance["int4"] < 0.6
    assert 1e-4 < distance["noise:0.001"] < 0.02
    assert 10 * distance["noise:0.001"] < distance["noise:0.05"] < 0.6


def test_none_is_bit_identical():
    model = build_model()
    before = state_of(model)
    engine = build_engine(model, mismatch=parse_mismatch("none"))
    engine.update_weights(before, "1")
    assert all(torch.equal(torch.tensor(before[name]), parameter) for name, parameter in model.named_parameters())
    assert total_variation("none", model) == 0.0


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
@pytest.mark.parametrize("shape", [(6, 64), (5, 48)])
def test_quantised_rows_lie_on_their_grid(bits, group, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    levels = 2 ** (bits - 1) - 1
    width = group if group and shape[1] % group == 0 else shape[1]
    result = fake_quantize(weight, bits, group)
    for row, quantised in zip(weight.split(width, 1), result.split(width, 1), strict=True):
        scale = row.abs().amax(1, keepdim=True) / levels
        assert bool(((row - quantised).abs() <= scale / 2 + 1e-6).all())
        grid = quantised / scale.clamp(min=1e-30)
        torch.testing.assert_close(grid, grid.round(), atol=1e-4, rtol=0)
        assert float(grid.abs().max()) <= levels + 1e-4
    assert not result[0].any()


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_but_a_tied_head_is_quantised(tied):
    model = build_model(tie_word_embeddings=tied)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parse_mismatch("int8").apply(model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)}
    expected = {name for name in before if "_proj" in name} | (set() if tied else {"lm_head.weight"})
    assert changed == expected
    assert len(linear_weights(model)) == len(expected)


def test_quantisation_follows_new_weights_and_keeps_the_dtype():
    model = build_model().to(torch.bfloat16)
    engine = build_engine(model, mismatch=parse_mismatch("int4"))
    fresh = build_model(initializer_range=0.1)
    engine.update_weights(state_of(fresh), "1")
    parse_mismatch("int4").apply(fresh.to(torch.bfloat16))
    for (name, ours), theirs in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs), name


def test_noise_is_the_same_after_every_update_and_after_a_resume():
    initial, later = build_model(), build_model(initializer_range=0.1)
    model = copy.deepcopy(initial)
    engine = build_engine(model, mismatch=parse_mismatch("noise:0.05", seed=5))
    deltas = []
    for fresh in (initial, later):
        engine.update_weights(state_of(fresh), "1")
        pairs = zip(fresh.named_parameters(), model.parameters(), strict=True)
        deltas.append({name: (ours - loaded).detach() for (name, loaded), ours in pairs})
    for name, start in initial.named_parameters():
        torch.testing.assert_close(deltas[0][name], deltas[1][name], atol=1e-6, rtol=0)
        ratio = (deltas[0][name] / start.detach())[start.abs() > 0.02]
        if ratio.numel() > 500:
            assert abs(float(ratio.mean())) < 0.01 and 0.045 < float(ratio.std()) < 0.055, name
    resumed_mismatch = parse_mismatch("noise:0.05", seed=5)
    resumed_mismatch.remember(initial)
    resumed = copy.deepcopy(later)
    build_engine(resumed, mismatch=resumed_mismatch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_noise_depends_on_seed_and_name():
    models = [build_model() for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        build_engine(model, mismatch=parse_mismatch("noise:0.05", seed=seed))
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    ratio = [first[f"model.layers.{layer}.input_layernorm.weight"] for layer in (0, 1)]
    assert not torch.equal(*ratio)


def test_noise_needs_initial_weights_of_the_same_architecture_once():
    noise = parse_mismatch("noise:0.1")
    with pytest.raises(ValueError, match="call remember"):
        noise.apply(build_model())
    noise.remember(build_model())
    with pytest.raises(ValueError, match="once a run"):
        noise.remember(build_model())
    with pytest.raises(ValueError, match="call remember"):
        noise.apply(build_model(num_hidden_layers=1))


def test_a_model_without_linear_layers_cannot_be_quantised():
    with pytest.raises(ValueError, match=r"--rollout-mismatch int8: .*use noise"):
        parse_mismatch("int8").apply(nn.Sequential(nn.Embedding(4, 4)))
