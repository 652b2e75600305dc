"""Which weights an answer may come from."""

from __future__ import annotations

from collections.abc import Iterable

FIRST_WEIGHTS = "default"  # what SGLang calls the weights that a server starts with


class StaleWeights(ValueError):
    """An answer sampled by weights older than those that its call was to be sampled by, or unknown ones."""


class VersionBook:
    """The versions that servers were given, in order.

    Args:
        found: what they held at first.
    """

    def __init__(self, found: Iterable[str]) -> None:
        self._age = dict.fromkeys(found, 0)
        self._current = 0

    @property
    def current(self) -> int:
        """The age of the newest version that every server holds; what is older has a smaller one."""
        return self._current

    def announce(self, version: str) -> None:
        """The version may turn up in answers from now on."""
        if not version or version == FIRST_WEIGHTS:
            raise ValueError(
                f"weight version {version!r}: give it a name, other than {FIRST_WEIGHTS!r}, SGLang's for a server's first weights"
            )
        self._age[version] = self._current + 1

    def settle(self, version: str) -> None:
        """Every server holds the version: a call that begins now is sampled by nothing older."""
        self._current = self._age[version]

    def check(self, versions: Iterable[str], oldest: int) -> None:
        """Refuses an answer whose tokens come from weights older than ``oldest``, or from ones that nobody here has sent.

        Raises:
            StaleWeights: naming both versions.
        """
        for version in versions:
            if self._age.get(version, -1) < oldest:
                expected = [name for name, age in self._age.items() if age >= oldest]
                raise StaleWeights(f"sampled by weight version {version!r}, expected {' or '.join(map(repr, expected))}")
