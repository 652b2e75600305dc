"""What answers the policy between its turns in the built-in trainer."""

from collections.abc import Callable, Sequence

from miles_sc.rollout.sample import Sample
from miles_sc.trainer.tasks import Problem


class VerifierFeedback:
    """Tells a policy that its answer was wrong, and lets it try again: a tool that every task has."""

    def __init__(self, problem: Problem, reward: Callable[[Problem, str], float], observation: Sequence[int]) -> None:
        """
        Args:
            reward: the task's; a turn that earns 1 ends the conversation.
            observation: token ids of what the policy is told otherwise.
        """
        self._problem, self._reward, self._observation = problem, reward, observation

    async def observe(self, sample: Sample, text: str) -> Sequence[int] | None:
        return None if self._reward(self._problem, text) >= 1 else self._observation
