"""Score centering for off-policy reinforcement learning of language models.

This is the inner ring: tensors and arrays in, tensors out. It needs torch and numpy, and brings neither a server nor Ray.
"""

TYPE_CHECKING = False  # type checkers take it for typing's, whose import would cost every interpreter 10 ms

if TYPE_CHECKING:
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

# Imported when first asked for: hosts/startup.py runs at the start of every interpreter and must not pull torch in.
_HOMES = {
    "Candidates": "miles_sc.candidates",
    "ScoreCenteringConfig": "miles_sc.config",
    "ScoreCenteringInputs": "miles_sc.loss.score_centering.estimator",
    "linear_selected_log_probs": "miles_sc.loss.linear_log_probs",
    "score_centering_loss": "miles_sc.loss.score_centering.estimator",
    "selected_log_probs": "miles_sc.loss.selected_log_probs",
    "support_log_probs": "miles_sc.loss.support_log_probs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
