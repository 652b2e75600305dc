"""What the policy is told between its turns, in the frames of several chat templates."""

import pytest
from transformers import AutoTokenizer

from miles_sc.trainer.prompts import PromptCodec

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{% if loop.last %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def codec(model, tmp_path):
    """``codec(template, eos)``: the tiny model's tokenizer under another template."""

    def codec(template, eos):
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.add_special_tokens({"eos_token": eos})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return PromptCodec(str(tmp_path / "tokenizer"), apply_chat_template=True)

    return codec


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        (QWEN, "<|im_end|>", "\n<|im_start|>user\n no: <|im_end|>\n<|im_start|>assistant\n"),
        (GEMMA, "<end_of_turn>", "\n<start_of_turn>user\n no: <end_of_turn>\n<start_of_turn>model\n"),
    ],
)
def test_what_is_told_begins_after_the_token_that_ended_the_answer(codec, template, eos, expected):
    codec = codec(template, eos)
    assert codec.tokenizer.decode(codec.encode_observation(" no: "), skip_special_tokens=False) == expected


@pytest.mark.parametrize(("template", "eos"), [(GEMMA, "<eos>"), (REWRITES, "<|im_end|>")])
def test_a_template_whose_answers_end_otherwise_is_refused(codec, template, eos):
    with pytest.raises(ValueError, match=f"does not end an answer with '{eos}'".replace("|", r"\|")):
        codec(template, eos).encode_observation(" no: ")


def test_without_a_template_it_is_the_text(model):
    codec = PromptCodec(str(model), apply_chat_template=False)
    assert codec.decode(codec.encode_observation(" 3 + 4")) == codec.decode(codec.encode(" 3 + 4"))
