"""Rule-based rewards: a rule compares a reference answer with the model's text, both str, and gives a float."""

import math
import re
from collections.abc import Callable
from decimal import Decimal

AnswerRule = Callable[[str, str], float]

CONSTANT_PREFIX = "constant:"

# A sign after a digit, letter or bracket is an operator, and thousands commas belong to the number.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-+])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)


def exact(answer: str, text: str) -> float:
    """1.0 when the stripped strings are equal, else 0.0."""
    return float(text.strip() == answer.strip())


def contains(answer: str, text: str) -> float:
    """1.0 when the stripped reference answer occurs anywhere in the text, else 0.0."""
    return float(answer.strip() in text)


def number(answer: str, text: str) -> float:
    """1.0 when the last number in the text equals the reference as a decimal (``1,000.0`` equals ``1000``), else 0.0.

    A reference that holds no number, or more than one, is a ValueError.
    """
    references = _numbers(answer)
    if len(references) != 1:
        raise ValueError(f"reward rule 'number' needs a reference answer that is one number, got {answer!r}")
    found = _numbers(text)
    return float(bool(found) and found[-1] == references[0])


RULES: dict[str, AnswerRule] = {"exact": exact, "number": number, "contains": contains}


def answer_rule(rm_type: str) -> AnswerRule:
    """Rule behind an ``--rm-type`` value: ``exact``, ``number``, ``contains`` or ``constant:<value>``.

    ``constant:<value>`` pays the same whatever the text, so the true policy gradient is zero. An unknown name, or a
    constant that is not a finite number, is a ValueError.
    """
    if rm_type in RULES:
        return RULES[rm_type]
    if rm_type.startswith(CONSTANT_PREFIX):
        value = _constant(rm_type)
        return lambda answer, text: value
    raise ValueError(f"--rm-type {rm_type!r} is unknown: use one of {', '.join(RULES)} or {CONSTANT_PREFIX}<value>")


def _constant(rm_type: str) -> float:
    raw = rm_type.removeprefix(CONSTANT_PREFIX)
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--rm-type {rm_type!r}: {raw!r} is not a finite number; write for example {CONSTANT_PREFIX}1")
    return value


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(match.replace(",", "")) for match in _NUMBER.findall(text.replace("\u2212", "-"))]
