"""Score centering in a trainer of your own: a plain PyTorch loop and three calls, collect, score and loss.

    python examples/own_trainer.py

A tiny policy learns to count on from a digit. A copy of it rounded to FP8 does the sampling, and answers as SGLang would.
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs
from miles_sc.rollout import Sample, append_candidates, configure_request

VOCAB, LENGTH, GROUP = 10, 4, 8  # tokens are digits; so many in a response; so many responses to a prompt
CONFIG = ScoreCenteringConfig(top_logprobs_num=5, temperature=1.0)
METRICS = ("sc_rollout_head_mass", "sc_train_head_mass", "train_rollout_logprob_abs_diff", "train_rollout_kl")


@torch.inference_mode()
def generate(sampler, request: dict) -> dict:
    tokens, sampled, top = list(request["input_ids"]), [], []
    for _ in range(request["sampling_params"]["max_new_tokens"]):
        log_q = (sampler(torch.tensor(tokens))[-1] / request["sampling_params"]["temperature"]).log_softmax(dim=-1)
        tokens.append(int(torch.multinomial(log_q.exp(), 1)))
        sampled.append([float(log_q[tokens[-1]]), tokens[-1], None])
        top.append([[float(log_q[i]), int(i), None] for i in log_q.topk(request["top_logprobs_num"]).indices])
    return {"meta_info": {"output_token_logprobs": sampled, "output_top_logprobs": top}}


def collect(sampler, prompt: list[int]) -> Sample:
    request = configure_request(CONFIG, {"input_ids": prompt, "sampling_params": {"max_new_tokens": LENGTH}})
    answer = generate(sampler, request)  # with a server: httpx.post(f"{url}/generate", json=request).json()
    sample = Sample(tokens=prompt)
    append_candidates(sample, answer["meta_info"], k=CONFIG.top_logprobs_num, mode=CONFIG.mode, vocab_size=VOCAB)
    return sample


def score(policy, samples: list[Sample]) -> Tensor:
    tokens = torch.tensor([sample.tokens for sample in samples])
    candidates = torch.from_numpy(np.concatenate([sample.rollout_topk_token_ids for sample in samples]))
    ids = torch.cat([tokens[:, -LENGTH:].reshape(-1, 1), candidates], dim=1)  # [T, 1+K], a row per response token
    logits = policy(tokens)[:, -LENGTH - 1 : -1].flatten(0, 1)  # [T, V]: a token's stand one place before it
    return selected_log_probs(logits, ids, temperature=CONFIG.temperature)


def loss(log_p: Tensor, samples: list[Sample], advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    candidate_log_q = torch.from_numpy(np.concatenate([sample.rollout_topk_log_probs for sample in samples]))
    inputs = ScoreCenteringInputs(
        train_log_probs=log_p[:, 0],
        train_head_log_probs=log_p[:, 1:],
        rollout_log_probs=torch.tensor([sample.rollout_log_probs for sample in samples]).flatten(),
        rollout_head_log_probs=candidate_log_q,
        head_mask=candidate_log_q > -torch.inf,
        advantages=advantages.repeat_interleave(LENGTH),
        active=torch.tensor([sample.loss_mask for sample in samples]).flatten() == 1,
    )
    return score_centering_loss(inputs, **CONFIG.estimator_settings)


torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, VOCAB, bias=False))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.005)
print("reward", *METRICS)
for _ in range(30):
    sampler = copy.deepcopy(policy).to(torch.float8_e5m2).float()
    samples = [collect(sampler, [digit]) for digit in range(VOCAB) for _ in range(GROUP)]
    tokens = torch.tensor([sample.tokens for sample in samples])
    rewards = (tokens.diff() % VOCAB == 1).float().mean(dim=1).view(VOCAB, GROUP)  # tokens one above the last
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    per_token, metrics = loss(score(policy, samples), samples, advantages)
    optimizer.zero_grad()
    per_token.mean().backward()
    optimizer.step()
    print(f"{rewards.mean():6.3f}", *(f"{metrics[name].mean():{len(name)}.5f}" for name in METRICS))
