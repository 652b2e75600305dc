"""The quick start's model: a small Qwen3 with its own tokenizer, warmed up on a task until it answers some problems.

It continues a prompt with a space and the answer, so it needs no chat template; the one it carries joins the messages.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_sc.trainer.files import whole_directory
from miles_sc.trainer.tasks import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

END, PAD = "<|endoftext|>", "<|pad|>"
JOIN_MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
IGNORE = -100
MIN_VOCABULARY = 256 + 2

Progress = Callable[[int, int, float], None]


class ProblemSet(Protocol):
    """What the warm-up needs of a task."""

    name: str

    def train(self, index: int) -> Problem: ...

    def held_out(self) -> list[Problem]: ...

    def reward(self, problem: Problem, text: str) -> float: ...


def make_tiny_model(
    output: Path,
    *,
    task: ProblemSet,
    seed: int,
    steps: int = 200,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    vocabulary: int = 300,
    max_new_tokens: int = 16,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build, warm up and save a model as a plain Hugging Face directory; returns what its ``miles_sc.json`` says.

    The tokenizer (byte-level BPE, digits single, at most ``vocabulary`` entries) is trained on the task's texts, the
    model on prompt -> answer, the loss on answer tokens only; held-out problems are touched only to be measured.
    ``progress(step, steps, loss)`` is called after every step, the loss in nats per answer token. The directory appears
    whole or not at all. The same seed and thread count give the same weights. An ``output`` that exists, a task without
    reference answers, or sizes that do not fit are ValueErrors.
    """
    import torch

    _check_request(output, hidden_size=hidden_size, heads=heads, steps=steps, batch_size=batch_size)
    started = time.monotonic()
    task.held_out()  # a task with too few problems is refused now, not after the warm-up
    tokenizer = build_tokenizer([_text(task.train(index)) for index in range(2000)], vocabulary=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(len(tokenizer), hidden_size=hidden_size, layers=layers, heads=heads)
        loss = warm_up(model, tokenizer, task, steps=steps, batch_size=batch_size, learning_rate=learning_rate, progress=progress)
    summary = {
        "task": task.name,
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": heads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "warm_up_loss": loss,
        "warm_up_seconds": round(time.monotonic() - started, 2),
        **measure_greedy(model, tokenizer, task, max_new_tokens=max_new_tokens),
    }
    with whole_directory(output) as unfinished, no_progress_bars():
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "miles_sc.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def build_tokenizer(texts: Sequence[str], *, vocabulary: int) -> "PreTrainedTokenizerFast":
    """Byte-level BPE with at most ``vocabulary`` entries: encodes any text, every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < MIN_VOCABULARY:
        raise ValueError(f"vocabulary {vocabulary} cannot hold 256 bytes, end and pad; use at least {MIN_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=JOIN_MESSAGES,
    )


def build_model(vocabulary: int, *, hidden_size: int, layers: int, heads: int) -> "Qwen3ForCausalLM":
    """A randomly initialised float32 Qwen3; token 0 ends a text and 1 pads, as ``build_tokenizer`` numbers them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            head_dim=hidden_size // heads,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
    )


def warm_up(
    model: "Qwen3ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    task: ProblemSet,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    progress: Progress | None = None,
) -> float:
    """Teacher forcing on ``steps`` fresh batches of training problems with AdamW; returns the last loss.

    After its ramp the learning rate stays up. Annealed weights score better at once, but RL's first updates then cost
    more than they bring, and the sharper policy leaves a sampler little to differ in.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 20 * (step + 1) / steps))
    model.train()
    loss = torch.tensor(math.nan)
    for step in range(steps):
        first = step * batch_size
        batch = answer_batch(tokenizer, [task.train(index) for index in range(first, first + batch_size)])
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if progress is not None:
            progress(step + 1, steps, loss.item())
    model.eval()
    return loss.item()


def answer_batch(tokenizer: "PreTrainedTokenizerFast", problems: Sequence[Problem]) -> dict[str, Any]:
    """``input_ids``, ``attention_mask``, ``labels``: int64 [B, T], padded on the right, labels -100 off the answer."""
    import torch

    rows = []
    for problem in problems:
        if not problem.answer:
            raise ValueError(f"no reference answer to {problem.prompt[:80]!r}; warm up on a task that has them")
        prompt = tokenizer.encode(problem.prompt)
        answer = [*tokenizer.encode(_completion(problem)), tokenizer.eos_token_id]
        rows.append((prompt + answer, [IGNORE] * len(prompt) + answer))
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [IGNORE] * (width - len(labels)) for _, labels in rows]),
    }


def measure_greedy(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", task: ProblemSet, *, max_new_tokens: int
) -> dict[str, Any]:
    """Mean reward and share of fully right answers (reward at least 1) on the held-out problems, decoded greedily."""
    import torch

    problems = task.held_out()
    rewards = []
    for start in range(0, len(problems), 256):
        part = problems[start : start + 256]
        inputs = tokenizer([problem.prompt for problem in part], return_tensors="pt", padding=True)
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += [task.reward(problem, text) for problem, text in zip(part, texts, strict=True)]
    return {
        "held_out_problems": len(rewards),
        "held_out_greedy_reward": sum(rewards) / len(rewards),
        "held_out_greedy_accuracy": sum(reward >= 1 for reward in rewards) / len(rewards),
    }


def _check_request(output: Path, *, hidden_size: int, heads: int, steps: int, batch_size: int) -> None:
    if output.exists():
        raise ValueError(f"--output {output} exists; remove it or name a new directory")
    for name, value in (("warm-up steps", steps), ("batch size", batch_size), ("heads", heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if hidden_size % (2 * heads):
        raise ValueError(f"hidden size {hidden_size} is no multiple of {2 * heads}, twice the number of heads; make it one")


def _completion(problem: Problem) -> str:
    return f" {problem.answer}"


def _text(problem: Problem) -> str:
    return problem.prompt + _completion(problem)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars while it reads or writes weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
