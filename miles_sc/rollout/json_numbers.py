"""JSON numbers as arrays, and nothing that merely looks like a number."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Kinds of number, by the type codes of `array`, which takes neither null nor strings for one (numpy takes both).
FLOAT32, FLOAT64, INT32, INT64 = "f", "d", "i", "q"


def read_numbers(values: Sequence[Any], kind: str, field: str, *, row_of: Callable[[int], int] = int) -> np.ndarray:
    """A list of JSON numbers as an array.

    Args:
        values: list or tuple, ``[n]``.
        kind: ``FLOAT32``, ``FLOAT64``, ``INT32`` or ``INT64``; a float may be written as a whole number.
        field: what to call it in an error.
        row_of: the row in which the number at a place stands.

    Raises:
        ValueError: null, a string, a boolean or a list in a number's place, a fraction in a whole number's, or a whole number
            that the kind does not hold; its row is named.
    """
    if not isinstance(values, list | tuple):
        raise ValueError(f"{field} = {values!r}: wanted a list of numbers")
    try:
        numbers = np.asarray(array(kind, values))
    except (TypeError, OverflowError) as error:
        raise _refusal(values, kind, field, row_of) from error
    if _hold_a_boolean(values, numbers):
        raise _refusal(values, kind, field, row_of)
    return numbers


def _hold_a_boolean(values: Sequence[Any], numbers: np.ndarray) -> bool:
    """Booleans count as 1 and 0, so only where these stand can one hide."""
    (suspects,) = ((numbers == 0) | (numbers == 1)).nonzero()
    return any(isinstance(values[place], bool) for place in suspects.tolist())


def _refusal(values: Sequence[Any], kind: str, field: str, row_of: Callable[[int], int]) -> ValueError:
    place, value = next((place, value) for place, value in enumerate(values) if not _is_number(value, kind))
    if kind == INT32 and type(value) is int:
        return ValueError(f"{field} holds an id beyond int32, {value} in row {row_of(place)}: these are not token ids")
    wanted = "a number" if kind in (FLOAT32, FLOAT64) else "a whole number"
    return ValueError(f"{field}, row {row_of(place)}: {value!r} in place of {wanted}")


def _is_number(value: Any, kind: str) -> bool:
    try:
        array(kind, [value])
    except (TypeError, OverflowError):
        return False
    return not isinstance(value, bool)
