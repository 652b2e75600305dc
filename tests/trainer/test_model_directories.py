"""What a look at the models' configurations shows before any process starts."""

import json

import pytest

from miles_sc.trainer.validation import check_model_directories
from tests.trainer.test_train_arguments import BASE, CENTERED, finish, parse


def model_directory(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--ref-load"])
def test_a_missing_model_is_refused_before_anything_starts(tmp_path, flag):
    model_directory(tmp_path, vocab_size=8)
    args = parse(*CENTERED, "--hf-checkpoint", tmp_path, flag, tmp_path / "none")
    with pytest.raises(ValueError, match=f"{flag} .*none: no Hugging Face model there .*; give a model directory"):
        check_model_directories(args)


@pytest.mark.parametrize(("vocab_size", "ok"), [(8, True), (7, False), (None, True)])
def test_k_is_held_to_the_models_vocabulary(tmp_path, vocab_size, ok):
    args = parse(*CENTERED, "--hf-checkpoint", model_directory(tmp_path, vocab_size=vocab_size))
    if ok:
        assert check_model_directories(args) is None
    else:
        with pytest.raises(
            ValueError, match="--rollout-top-logprobs-num 8 exceeds the model's vocabulary of 7: set it to at most 7"
        ):
            check_model_directories(args)


def qwen3(path, **config):
    path.mkdir()
    return model_directory(path, **({"model_type": "qwen3", "vocab_size": 300, "num_attention_heads": 4} | config))


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    policy, reference = qwen3(tmp_path / "policy"), qwen3(tmp_path / "reference", vocab_size=400)
    args = finish(*BASE, "--hf-checkpoint", policy, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", reference)
    with pytest.raises(ValueError, match="--ref-load .*reference has a vocabulary of 400 and the policy one of 300"):
        check_model_directories(args)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        ({}, 3, "--tensor-model-parallel-size 3 does not fit the model's num_attention_heads = 4"),
        ({"model_type": "mistral"}, 1, "a mistral model: it builds llama, qwen2, qwen3"),
    ],
)
def test_what_megatron_does_not_build_is_refused_before_any_process_starts(tmp_path, config, size, message):
    policy = qwen3(tmp_path / "policy", **config)
    flags = ["--train-backend", "megatron", "--tensor-model-parallel-size", str(size)]
    with pytest.raises(ValueError, match=message):
        check_model_directories(finish(*BASE, "--hf-checkpoint", policy, *flags))
