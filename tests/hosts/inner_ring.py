"""A step's loss, gradient and metrics from the public calls alone, in one process: what a host's step is held against."""

import torch

from miles_sc import ScoreCenteringConfig, ScoreCenteringInputs, score_centering_loss, selected_log_probs, support_log_probs


def inner_ring(run, data, tables):
    """The loss of whole samples, its gradient to each table, and the per-token metrics of each.

    Args:
        data: lists of arrays per sample, by the names of Miles's train data.
        tables: float32 ``[total, padded vocabulary]`` each, the logits of every token.
    """
    config, padded = ScoreCenteringConfig.from_args(run), tables[0].shape[1]
    vocab_size = run.vocab_size or padded
    tables = [torch.tensor(table, dtype=torch.float64, requires_grad=True) for table in tables]
    score = support_log_probs if config.mode == "support" else selected_log_probs
    loss, metrics = torch.zeros((), dtype=torch.float64), []
    masks = [torch.tensor(mask, dtype=torch.float64) for mask in data["loss_masks"]]
    for i, table in enumerate(tables):
        n = data["response_lengths"][i]
        ids = torch.cat([torch.tensor(data["tokens"][i][-n:])[:, None], torch.tensor(data["rollout_topk_token_ids"][i])], dim=1)
        log_p = score(table[-n - 1 : -1], ids, vocab_size=vocab_size, temperature=config.temperature)
        per_token, own = score_centering_loss(
            ScoreCenteringInputs(
                log_p[:, 0], log_p[:, 1:], torch.tensor(data["rollout_log_probs"][i]),
                torch.tensor(data["rollout_topk_log_probs"][i], dtype=torch.float64),
                torch.tensor(data["rollout_topk_token_ids"][i]) >= 0, torch.tensor(data["advantages"][i]), masks[i] > 0,
                complete_head=config.mode == "support",
            ),
            **config.estimator_settings,
        )  # fmt: skip
        if run.use_kl_loss:
            difference = log_p[:, 0] - torch.tensor(data["ref_log_probs"][i])
            per_token = per_token + run.kl_loss_coef * torch.where(masks[i] > 0, difference, 0.0)
        if run.entropy_coef:
            full = torch.log_softmax(table[-n - 1 : -1, :vocab_size] / config.temperature, dim=1)
            per_token = per_token + run.entropy_coef * torch.where(masks[i] > 0, (full.exp() * full).sum(1), 0.0)
        denominator = 1.0 if run.calculate_per_token_loss else masks[i].sum()
        loss = loss + (per_token * masks[i]).sum() / denominator
        metrics.append(own)
    loss.backward()
    return loss.detach(), [table.grad.float() for table in tables], metrics
