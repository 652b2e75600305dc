"""Score centering for off-policy reinforcement learning of language models.

This is the inner ring: tensors and arrays in, tensors out. It needs torch and numpy, and brings neither a server nor Ray.
"""

from miles_sc.candidates import Candidates
from miles_sc.config import ScoreCenteringConfig
from miles_sc.loss.linear_log_probs import linear_selected_log_probs
from miles_sc.loss.score_centering.estimator import ScoreCenteringInputs, score_centering_loss
from miles_sc.loss.selected_log_probs import selected_log_probs
from miles_sc.loss.support_log_probs import support_log_probs

__version__ = "0.1.0"

__all__ = [
    "Candidates",
    "ScoreCenteringConfig",
    "ScoreCenteringInputs",
    "linear_selected_log_probs",
    "score_centering_loss",
    "selected_log_probs",
    "support_log_probs",
]
