"""Copies of the stand-in host, each under a name that no other test has, and tables of seams for them."""

import importlib
import itertools
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_sc.hosts import flags
from miles_sc.hosts.activation import Activation, deactivate, enter
from miles_sc.hosts.seams import Host, Seam

_TEMPLATE = Path(__file__).parent / "stand_in"
_NUMBERS = itertools.count()


class StandIn:
    """A copy of the host in a folder that can be imported from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder, f"stand_in_{next(_NUMBERS)}"
        shutil.copytree(_TEMPLATE, self.directory, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def directory(self) -> Path:
        return self.folder / self.package

    def seam(self, place: str, **given: Any) -> Seam:
        """``place`` is ``module.attribute``; a wrapper's seam says ``wrap=...``."""
        module, attribute = place.split(".", 1)
        return Seam(f"{self.package}.{module}", attribute, **{"loses": "the loss is unknown", **given})

    def table(self, *seams: Seam, **given: Any) -> Host:
        entry = f"{self.package}.arguments"
        return Host(**{"package": self.package, "entry": entry, "seams": seams, **given})

    def enter(self, *seams: Seam, **given: Any) -> Activation | None:
        return enter(self.table(*seams, **given), [str(self.directory)])

    def enter_command_line(self, *more: Seam) -> Activation:
        """The seams that :mod:`miles_sc.hosts.flags` is for."""
        return self.enter(
            self.seam("arguments.get_extra_args_provider", parameters=("add_custom_arguments",), wrap=flags.add_flags),
            self.seam("arguments.validate_args", parameters=("args",), wrap=flags.validate),
            *more,
        )

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{module}")


@contextmanager
def stand_in(folder: Path) -> Iterator[StandIn]:
    """A copy that is forgotten again: its path, its modules and what was done to it."""
    host = StandIn(folder)
    sys.path.insert(0, str(folder))
    try:
        yield host
    finally:
        deactivate(host.package)
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == host.package]:
            del sys.modules[name]
