"""One prompt and its response on the way from the engine to the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from miles_sc.candidates import Candidates
from miles_sc.rollout.recorded_rows import RecordedRows
from miles_sc.sampling_support import SamplingSupport


@dataclass
class Sample:
    """A prompt, its response and, row by row, what the sampler knew about each response token.

    Attributes:
        tokens: prompt ids followed by response ids.
        response_length: R, the trailing tokens that are response.
        loss_mask: R of 0 or 1; None while there is no response.
        rollout_log_probs: R log q of the response tokens, 0.0 on observations.
        rollout_topk_token_ids: int32 ``[R, K]``, -1 in unused slots.
        rollout_topk_log_probs: float32 ``[R, K]``, -inf in unused slots.
        rollout_sampling_mask: the support each token was drawn from, under filtered sampling.
        weight_versions: R names of the weights that sampled each token, "" on observations; None if nobody tracks them.
        index, group_index: place in the rollout; samples of one prompt share the group.
        reward: filled by the task's verifier.
        response: the decoded response.
        truncated: the response ended at its length limit.
        aborted: the engine was made to stop; the response can be continued.
        turns: how often the policy has ended its turn.
    """

    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_topk_token_ids: np.ndarray | None = None
    rollout_topk_log_probs: np.ndarray | None = None
    rollout_sampling_mask: SamplingSupport | None = None
    weight_versions: list[str] | None = None
    index: int = -1
    group_index: int = -1
    reward: float | None = None
    response: str = ""
    truncated: bool = False
    aborted: bool = False
    turns: int = 0

    @property
    def candidates(self) -> Candidates | None:
        """Both arrays as one value."""
        if self.rollout_topk_token_ids is None and self.rollout_topk_log_probs is None:
            return None
        return Candidates(self.rollout_topk_token_ids, self.rollout_topk_log_probs)

    @candidates.setter
    def candidates(self, value: Candidates | None) -> None:
        self.rollout_topk_token_ids = None if value is None else value.token_ids
        self.rollout_topk_log_probs = None if value is None else value.log_probs

    def newest_turn(self) -> list[int]:
        """What the policy has generated since the last observation."""
        mask = self.loss_mask or ()
        length = next((back for back, generated in enumerate(reversed(mask)) if not generated), self.response_length)
        return self.tokens[len(self.tokens) - length :]

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that nobody sampled (a tool's answer): untrained gap rows."""
        rows = len(token_ids)
        self.check_rows()
        if self.response_length and (self.loss_mask is None or self.rollout_log_probs is None):
            raise ValueError(
                f"sample {self.index}: its {self.response_length} response tokens lack loss_mask or rollout_log_probs; "
                "fill both before an observation is appended"
            )
        if (recorded := RecordedRows.of(self)) is not None:
            recorded.append_observation(token_ids).put(self)
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *([0.0] * rows)]
        self.loss_mask = [*(self.loss_mask or ()), *([0] * rows)]
        if self.weight_versions is not None:
            self.weight_versions = [*self.weight_versions, *([""] * rows)]
        self.tokens = [*self.tokens, *token_ids]
        self.response_length += rows

    def strip_last_output_tokens(self, count: int) -> None:
        """Removes the last ``count`` response tokens and every row that belongs to them."""
        if not 0 <= count <= self.response_length:
            raise ValueError(
                f"cannot strip {count} tokens of a response of {self.response_length}: give 0..{self.response_length}"
            )
        self.check_rows()
        kept = self.response_length - count
        if (recorded := RecordedRows.of(self)) is not None:
            recorded.trim(count).put(self)
        if self.rollout_log_probs is not None:
            self.rollout_log_probs = self.rollout_log_probs[:kept]
        if self.loss_mask is not None:
            self.loss_mask = self.loss_mask[:kept]
        if self.weight_versions is not None:
            self.weight_versions = self.weight_versions[:kept]
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.response_length = kept

    def truncate(self, response_length: int) -> None:
        """Keeps the first ``response_length`` response tokens and marks the sample truncated if that cut anything."""
        if response_length < self.response_length:
            self.strip_last_output_tokens(self.response_length - response_length)
            self.truncated = True

    def reset_for_retry(self) -> None:
        """Forgets the response and everything recorded with it; the prompt stays."""
        self.tokens = self.tokens[: len(self.tokens) - self.response_length]
        self.response_length = 0
        self.loss_mask = self.rollout_log_probs = self.candidates = self.rollout_sampling_mask = None
        self.weight_versions = None
        self.reward, self.response, self.truncated, self.aborted, self.turns = None, "", False, False, 0

    def check_rows(self) -> None:
        """Every per-token field has one entry per response token, or is absent.

        Raises:
            ValueError: the field and both lengths.
        """
        if not 0 <= self.response_length <= len(self.tokens):
            raise ValueError(f"sample {self.index}: response_length {self.response_length} of {len(self.tokens)} tokens")
        lengths = {
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.rollout_log_probs,
            "rollout_topk_token_ids": self.rollout_topk_token_ids,
            "rollout_topk_log_probs": self.rollout_topk_log_probs,
            "rollout_sampling_mask": self.rollout_sampling_mask,
            "weight_versions": self.weight_versions,
        }
        for name, value in lengths.items():
            if value is not None and len(value) != self.response_length:
                raise ValueError(
                    f"sample {self.index}: {name} has {len(value)} rows for a response of {self.response_length} tokens; "
                    "every response token needs exactly one"
                )
