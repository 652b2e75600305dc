"""What score centering adds to a step of the main job: training and rollout, against policy_loss on the same samples.

    python benchmarks/step_cost.py --hf-checkpoint MODEL --task spell_backward

One process holds sampler and trainer. Both losses train on the same rollout in turn (ABAB...), so that the ratios are
paired. policy_loss takes the sampler's log-probs as the old policy, that is without a forward pass of its own before training;
with that pass (its default) it costs more, and the ratio is shown too.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from miles_sc.backends.fsdp import FsdpBackend
from miles_sc.backends.pretrained import load_causal_lm
from miles_sc.backends.settings import OptimizerSettings
from miles_sc.config import ScoreCenteringConfig
from miles_sc.data.conversion import samples_to_train_data
from miles_sc.data.micro_batch import build_micro_batch
from miles_sc.data.sharding import shard
from miles_sc.loss.batch import LossSettings
from miles_sc.loss.hub import loss_function
from miles_sc.loss.scoring import score
from miles_sc.rollout.engines.embedded import EmbeddedEngine
from miles_sc.rollout.engines.in_process import InProcessEngine
from miles_sc.rollout.engines.mismatch import parse_mismatch
from miles_sc.rollout.generate import GenerationSettings, all_or_none, generate_response
from miles_sc.rollout.sample import Sample
from miles_sc.trainer.prompts import PromptCodec
from miles_sc.trainer.tasks import load_task, parse_task_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR")
    parser.add_argument("--task", required=True, metavar="NAME")
    parser.add_argument("--task-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        compare(args)
        dist.destroy_process_group()


def compare(args: argparse.Namespace) -> None:
    """Prints paired ratios."""
    codec = PromptCodec(args.hf_checkpoint, apply_chat_template=False)
    backend = FsdpBackend(args.hf_checkpoint, optimizer=OptimizerSettings(lr=0.0))
    candidates = min(128, backend.vocab_size)
    configs = {k: ScoreCenteringConfig(top_logprobs_num=k) for k in (0, candidates)}
    rollout = rollout_function(args, codec, backend.vocab_size)
    samples = rollout(configs[candidates])
    data = samples_to_train_data(samples, configs[candidates], vocab_size=backend.vocab_size)
    step = shard(data, world_size=1, global_batch_size=len(samples), per_token=True, max_tokens=args.max_tokens)[0]
    columns = dict(step.data, old_log_probs=step.data["rollout_log_probs"])
    without = {name: column for name, column in columns.items() if not name.startswith("rollout_topk")}
    settings = {k: LossSettings(score_centering=config, inplace_backward=True) for k, config in configs.items()}

    def micro_batches(source):
        return (build_micro_batch(source, m, backend.device, pad_token_id=codec.pad_token_id) for m in step.steps[0])

    def sampled(logits, batch):
        return score(logits, batch, settings[0], with_head=False).sampled

    passes = len(step.steps[0])
    contenders = {
        "policy_loss": lambda: backend.train_step(micro_batches(without), passes, loss_function("policy_loss"), settings[0]),
        "policy_loss with its forward pass": lambda: (
            [backend.score(micro_batch, sampled) for micro_batch in micro_batches(without)],
            backend.train_step(micro_batches(without), passes, loss_function("policy_loss"), settings[0]),
        ),
        "score_centering": lambda: backend.train_step(
            micro_batches(columns), passes, loss_function("score_centering"), settings[candidates]
        ),
        "rollout, K = 0": lambda: rollout(configs[0]),
        f"rollout, K = {candidates}": lambda: rollout(configs[candidates]),
    }
    seconds = in_turn(contenders, args.repeats)
    tokens = sum(data["response_lengths"])
    print(f"{len(samples)} samples, {tokens} response tokens, vocabulary {backend.vocab_size}, K = {candidates}")
    report("training step", seconds, "score_centering", "policy_loss")
    report("training step", seconds, "score_centering", "policy_loss with its forward pass")
    report("rollout", seconds, f"rollout, K = {candidates}", "rollout, K = 0")


def rollout_function(args, codec: PromptCodec, vocab_size: int) -> Callable[[ScoreCenteringConfig], list[Sample]]:
    """Samples the same prompts with the same seeds each time."""
    task = load_task(
        task=args.task, prompt_data=None, rm_type=None, seed=0, held_out=8, task_options=parse_task_options(args.task_option)
    )
    engine = InProcessEngine(
        EmbeddedEngine(
            load_causal_lm(args.hf_checkpoint),
            stop_token_ids=codec.stop_token_ids,
            pad_token_id=codec.pad_token_id,
            seed=0,
            mismatch=parse_mismatch("int4"),
        )
    )
    prompts = [codec.encode(task.train(i).prompt) for i in range(args.prompts)]

    def rollout(config: ScoreCenteringConfig) -> list[Sample]:
        count = args.prompts * args.samples_per_prompt
        samples = [
            Sample(tokens=list(prompts[i // args.samples_per_prompt]), index=i, group_index=i // args.samples_per_prompt)
            for i in range(count)
        ]
        settings = GenerationSettings(config, 16, vocab_size, codec.decode)
        asyncio.run(all_or_none(generate_response(engine, sample, settings, sampling_seed=sample.index) for sample in samples))
        for sample in samples:
            sample.reward = float(sample.index % 2)
        return samples

    return rollout


def in_turn(contenders: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender, one after the other, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + 2):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def report(what: str, seconds: dict[str, list[float]], ours: str, theirs: str) -> None:
    """Median of the paired ratios, with its quartiles."""
    ratios = sorted(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"{what}: {ours} / {theirs} = {statistics.median(ratios):.3f}  (quartiles {low:.3f} .. {high:.3f})")


if __name__ == "__main__":
    main()
