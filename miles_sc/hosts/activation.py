"""Installs a host's seams: each module is wrapped when it is imported, before anybody binds a name from it."""

import contextlib
import copy
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import wrapt

from miles_sc.hosts.seams import Fault, Host, HostSource, Seam

_RECORD, _OURS = "--rollout-top-logprobs-num", "--score-centering-"
_FLAGS = ("--loss-type score_centering ", _OURS, f"{_RECORD} ")
_TAKEOVER_FLAGS = ("--score-centering-provider ",)


@dataclass
class Activation:
    """What the plugin has done to a host in this process.

    Attributes:
        version: of the host's distribution, or that it is unknown, and where its source lies.
        faults: seams that are not as they must be; with one there nothing is wrapped.
        own_loss: the host has a score centering of its own.
        seams: those in use here; on a host with its own loss the few that a takeover needs.
        installed: names of the seams whose module has been imported, and which are wrapped.
    """

    host: Host
    version: str
    faults: list[Fault]
    own_loss: bool
    seams: tuple[Seam, ...]
    installed: list[str] = field(default_factory=list)
    _undo: list[tuple[Seam, Callable[[], None]]] = field(default_factory=list)
    _wraps: bool = True
    _asked: bool = False

    def require(self) -> None:
        """Nothing may train half-installed. Once this was called, a module where a fault shows cannot be imported.

        Raises:
            ValueError: every seam at fault, the host's version and the remedy.
        """
        self._asked = True
        if self.faults:
            listed = "\n".join(f"  {fault}" for fault in self.faults)
            raise ValueError(
                f"score centering cannot enter this {self.host.package} ({self.version}): {len(self.faults)} of its "
                f"{len(self.seams)} seams are not as this plugin knows them, so none is used:\n{listed}\n"
                f"install a miles_sc that knows this {self.host.package}, or a {self.host.package} that docs/hosts.md lists"
            )

    def install(self, module: ModuleType) -> None:
        """Wraps the seams of a module that has just been imported; none where the source had a fault.

        A fault that shows only now takes back what was wrapped before, but for the guards: a process of Ray is told nothing of
        the run when it imports, and must not run it without us.
        """
        mine = [seam for seam in self.seams if seam.module == module.__name__ and (seam.wrap or seam.replace)]
        if not self._wraps or any(seam.name in self.installed for seam in mine):
            return
        if not self.faults:
            self.faults += [Fault(seam, found) for seam in mine if (found := _find_fault(module, seam))]
            if self.faults:
                self._take_back(lambda seam: not seam.guards)
                if self._asked:
                    self.require()
        for seam in mine:
            if not self.faults or (seam.guards and _is_there(module, seam)):
                self._undo.append((seam, _apply(module, seam)))
                self.installed.append(seam.name)

    def refuse_flags(self, module: ModuleType) -> None:
        """At the import of the host's command line: our flags, unknown to its parser where we could not enter, are explained."""
        ours = _TAKEOVER_FLAGS if self.own_loss else _FLAGS
        line = " ".join(sys.argv[1:]).replace("=", " ") + " "
        if activation(self.host.package) is self and any(flag in line for flag in ours):
            self.require()

    def undo(self) -> None:
        """Puts back what was wrapped here. Names that others have bound meanwhile stay wrapped."""
        self._wraps = False
        self._take_back(lambda seam: True)

    def _take_back(self, chosen: Callable[[Seam], bool]) -> None:
        for seam, undo in reversed(self._undo):
            if chosen(seam):
                undo()
                self.installed.remove(seam.name)
        self._undo = [(seam, undo) for seam, undo in self._undo if not chosen(seam)]


_ACTIVATIONS: dict[str, Activation] = {}
_LOOKED_FOR: set[str] = set()


def activation(package: str) -> Activation | None:
    """That of a host in this process; None where it was not imported, or nothing watched."""
    return _ACTIVATIONS.get(package)


def required(package: str) -> Activation:
    """That of a host whose run asks for the feature.

    Raises:
        ValueError: it is at fault, see :meth:`Activation.require`, or was undone.
    """
    if (active := activation(package)) is None:
        raise ValueError(
            f"miles_sc was taken out of {package} in this process, and this run asks for score centering: restart it"
        )
    active.require()
    return active


def activate(package: str) -> Activation | None:
    """Checks a host's seams and sees to it that each is wrapped when its module is imported.

    Called just before the host is imported. Never raises for a host that it does not know: :meth:`Activation.require` does,
    once a run asks for the feature.

    Returns:
        None where the package is not there, or is a stranger of the same name.
    """
    if package in _ACTIVATIONS or package in _LOOKED_FOR:
        return activation(package)
    _LOOKED_FOR.add(package)  # looking for it asks our own finder again
    try:
        found = find_spec(package)
    finally:
        _LOOKED_FOR.discard(package)
    directories = list(found.submodule_search_locations or ()) if found is not None else []
    return enter(known_host(package), directories)


def known_host(package: str) -> Host:
    """The table of a host."""
    from miles_sc.hosts import miles, slime

    return {"miles": miles.HOST, "slime": slime.HOST}[package]


def enter(host: Host, directories: list[str]) -> Activation | None:
    """The same for a table and the directories of its package."""
    source = HostSource(directories)
    if not source.has(host.entry):
        return None
    mentioned = source.mentions(host.entry)
    own = bool(host.own_loss) and (host.own_loss in mentioned or any(name.startswith(_OURS) for name in mentioned))
    layouts = (host.takeover or ((),)) if own else (host.seams,)
    checked = [(source.check(layout), layout) for layout in layouts]
    faults, seams = min(checked, key=lambda found: bool(found[0]))  # the first that fits, else the first
    if not own and _RECORD in mentioned:
        faults = [*faults, Fault(seams[0], f"it would be given {_RECORD}, a flag that the host has already")]
    active = Activation(host, _version(host.package, directories), faults, own, seams, _wraps=not faults)
    _ACTIVATIONS[host.package] = active
    for module in dict.fromkeys([seam.module for seam in seams]):
        wrapt.register_post_import_hook(active.install, module)
    wrapt.register_post_import_hook(active.refuse_flags, host.entry)
    return active


def deactivate(package: str) -> None:
    """Undoes :func:`activate`: for tests, and for whoever wants the plain host back in a running process."""
    if (active := _ACTIVATIONS.pop(package, None)) is not None:
        active.undo()


def _find_fault(module: ModuleType, seam: Seam) -> str | None:
    """What the source could not tell. Two plugins in one place cannot know of each other."""
    owner, name = _owner(module, seam)
    if not _is_there(module, seam):
        return "it is not there once its module has been imported"
    value = owner.__dict__[name]
    value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    author = _author(value)  # decorators of the host's own are no fault
    if seam.parameters is None or author.split(".")[0] == module.__name__.split(".")[0]:
        return None
    return (
        f"{author} has decorated, wrapped or replaced it before us ({type(value).__name__}): where that is another plugin, "
        "uninstall one of the two"
    )


def _is_there(module: ModuleType, seam: Seam) -> bool:
    owner, name = _owner(module, seam)
    return name in getattr(owner, "__dict__", ())


def _author(value: Any) -> str:
    """The module whose source it is: ``__module__`` of a wrapper is that of what it wraps, and wrapt's pass for it altogether."""
    written = getattr(value, "_self_wrapper", value)
    return getattr(written, "__globals__", {}).get("__name__", type(value).__module__)


class _BoundSeamWrapper(wrapt.BoundFunctionWrapper):
    """A wrapped method, copied and pickled like one: by what it is bound to and its name."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._self_instance is None:  # taken from its class
            return self
        return getattr(copy.deepcopy(self._self_instance, memo), self.__name__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._self_instance is None:
            return _by_name(self._self_parent._self_seam)
        return getattr, (self._self_instance, self.__name__)


class _SeamWrapper(wrapt.FunctionWrapper):
    """Copied and pickled as its name, like the function in whose place it is: Ray exports actors with their methods' globals."""

    __bound_function_wrapper__ = _BoundSeamWrapper

    def __init__(self, wrapped: Callable[..., Any], wrapper: Callable[..., Any], seam: Seam) -> None:
        super().__init__(wrapped, wrapper)
        self._self_seam = seam

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        seam = self._self_seam
        if (seam.module, seam.attribute) == (self.__module__, self.__qualname__):
            return self.__qualname__
        return _by_name(seam)  # its module has imported it


def _by_name(seam: Seam) -> tuple[Callable[[str], Any], tuple[str]]:
    return pkgutil.resolve_name, (f"{seam.module}:{seam.attribute}",)


def _apply(module: ModuleType, seam: Seam) -> Callable[[], None]:
    owner, name = _owner(module, seam)
    before = owner.__dict__[name]
    if seam.wrap is not None:
        wrapt.wrap_object(module, seam.attribute, _SeamWrapper, (seam.wrap, seam))
    else:
        setattr(owner, name, seam.replace(before))
    return partial(setattr, owner, name, before)


def _owner(module: ModuleType, seam: Seam) -> tuple[Any, str]:
    *path, name = seam.attribute.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    return owner, name


def _version(package: str, directories: list[str]) -> str:
    version = "version unknown"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = f"version {importlib.metadata.version(package)}"
    return f"{version}, in {directories[0]}"
