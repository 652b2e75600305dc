"""A rollout producer of your own: a sampler that miles_sc knows nothing about fills the fields of a Sample.

    python examples/custom_producer.py --hf-checkpoint MODEL

The sampler here is a plain loop over a Hugging Face model. What it fills in is validated as the trainer does it.
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_sc import ScoreCenteringConfig
from miles_sc.data.conversion import samples_to_train_data
from miles_sc.rollout import Sample


@torch.inference_mode()
def produce(model, prompt: list[int], *, k: int, temperature: float, length: int, index: int) -> Sample:
    """One sampled response with the K likeliest tokens of the very distribution that each token was drawn from."""
    tokens, log_probs, head_ids, head_log_probs = list(prompt), [], [], []
    for _ in range(length):
        logits = model(torch.tensor([tokens])).logits[0, -1].float() / temperature
        log_q = logits - logits.logsumexp(dim=-1)  # natural logarithms over the whole vocabulary
        token = int(torch.multinomial(log_q.exp(), 1))
        head = log_q.topk(k)
        tokens.append(token)
        log_probs.append(float(log_q[token]))  # the sampled token, whether it is in the head or not
        head_ids.append(head.indices.numpy())
        head_log_probs.append(head.values.numpy())
    return Sample(
        tokens=tokens,
        response_length=length,
        loss_mask=[1] * length,  # 0 on tokens that nobody sampled, e.g. a tool's answer
        rollout_log_probs=log_probs,
        rollout_topk_token_ids=np.array(head_ids, np.int32),  # [R, K], -1 in unused slots
        rollout_topk_log_probs=np.array(head_log_probs, np.float32),  # [R, K], -inf in unused slots
        index=index,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-checkpoint", required=True, metavar="DIR")
    parser.add_argument("--prompt", default="3 + 4 =")
    parser.add_argument("--rollout-top-logprobs-num", type=int, default=32, metavar="K")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint).eval()
    prompt = AutoTokenizer.from_pretrained(args.hf_checkpoint).encode(args.prompt)
    config = ScoreCenteringConfig(top_logprobs_num=args.rollout_top_logprobs_num, temperature=0.8)
    torch.manual_seed(0)
    samples = [
        produce(model, prompt, k=config.top_logprobs_num, temperature=config.temperature, length=6, index=i) for i in range(4)
    ]
    for sample in samples:
        sample.reward, sample.group_index = float(sample.index % 2), 0
    data = samples_to_train_data(samples, config, vocab_size=model.config.vocab_size)  # raises where a field is wrong
    mass = np.exp(samples[0].rollout_topk_log_probs.astype(np.float64)).sum(axis=1).mean()
    print(f"{len(data['tokens'])} samples are ready to train on; the {config.top_logprobs_num} candidates hold {mass:.4f} of q")


if __name__ == "__main__":
    main()
