"""What is refused of a model directory."""

import json

import pytest
from safetensors.torch import load_file, save_file

from miles_sc.backends.pretrained import load_causal_lm


def test_a_model_without_some_of_its_weights_is_refused(model, tmp_path):
    """transformers fills them at random, so that sampler, trainer and evaluation would each hold another model."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    lost = next(name for name in weights if "layers.1." in name)
    save_file({name: value for name, value in weights.items() if name != lost}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"weights lack {lost} \\(of 1\\), which would be random"):
        load_causal_lm(str(directory))


def test_dropout_is_off(model, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    assert load_causal_lm(str(directory)).config.attention_dropout == 0.0
