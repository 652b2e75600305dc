"""What one check found, and what to do about it."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Verdict(enum.Enum):
    """How a check came out; the value is what a table calls it."""

    OK = "ok"
    NOTE = "note"
    FAILED = "fails"
    UNKNOWN = "could not tell"


@dataclass(frozen=True)
class Finding:
    """One check of one route.

    Attributes:
        check: its name, the same from run to run.
        route: ``native``, ``chat`` or ``server``.
        verdict: NOTE works, at a price; UNKNOWN was not, or could not be, looked at.
        came: what was asked and what came.
        remedy: what to do; "" where nothing is to be done.
    """

    check: str
    route: str
    verdict: Verdict
    came: str
    remedy: str = ""


def raise_on_failure(findings: Iterable[Finding]) -> None:
    """Refuses a route that would degrade the run.

    Raises:
        ValueError: every failed check, what came and the remedy.
    """
    failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    if failed:
        lines = [f"- {finding.route}, {finding.check}: {finding.came}; {finding.remedy}" for finding in failed]
        raise ValueError("\n".join(["the route to the engine does not deliver what training needs:", *lines]))
