"""Where a host is touched, and what it must look like there. Checked from its source, before any of it is imported."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Wrappers:
    """A module of wrappers that the first call of one imports: most processes of a host call none, and torch takes seconds."""

    module: str

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: getattr(import_module(self.module), name)(*given)


@dataclass(frozen=True)
class Seam:
    """One attribute of a host and what is done there.

    Attributes:
        module, attribute: where; a method is ``Class.method``.
        loses: what a run loses without it, as the end of a sentence "without it ...".
        parameters: its leading parameters, by name and in order; None where it is no function of its own.
        awaited: it is a coroutine function.
        rests_on: names and strings that must stand in its source: the assumption that our side rests on.
        within: the function whose source that is, if it is another one of the same module.
        wrap: called as ``wrap(wrapped, instance, args, kwargs)`` in its place (wrapt's convention).
        replace: for a value: given the old one, returns the new one.
        guards: its wrapper stops a run that asks for the feature where another seam turns out to be at fault, so it stays.

    Neither ``wrap`` nor ``replace``: only checked, since others rest on it.
    """

    module: str
    attribute: str
    loses: str
    parameters: tuple[str, ...] | None = None
    awaited: bool = False
    rests_on: tuple[str, ...] = ()
    within: str = ""
    wrap: Wrapper | None = None
    replace: Callable[[Any], Any] | None = None
    guards: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True)
class Fault:
    """A seam that is not as it must be."""

    seam: Seam
    found: str

    def __str__(self) -> str:
        return f"{self.seam.name}: {self.found}; without it {self.seam.loses}"


@dataclass(frozen=True)
class Host:
    """A host and the seams by which the plugin enters it.

    Attributes:
        package: what is imported.
        entry: the module that reads the command line; a stranger of the same name has none.
        seams: all of them; either every one is as it must be, or none is touched.
        own_loss: a string that stands in ``entry`` where the host has a score centering of its own.
        takeover: the seams used there, for each way that such a host may be laid out; the first that fits counts.
    """

    package: str
    entry: str
    seams: tuple[Seam, ...]
    own_loss: str = ""
    takeover: tuple[tuple[Seam, ...], ...] = ()


class HostSource:
    """The source of an installed host, read and never run."""

    def __init__(self, directories: Sequence[str]) -> None:
        """
        Args:
            directories: of its package.
        """
        self.directories = tuple(directories)

    def has(self, module: str) -> bool:
        return self._path(module) is not None

    def mentions(self, module: str) -> frozenset[str]:
        """Every name and string in a module; empty where it does not exist."""
        tree = self._tree(module)
        return frozenset() if tree is None else _mentioned(tree)

    def check(self, seams: Sequence[Seam]) -> list[Fault]:
        """Those that are not as they must be."""
        return [Fault(seam, found) for seam in seams if (found := self._find_fault(seam))]

    def _find_fault(self, seam: Seam) -> str | None:
        tree = self._tree(seam.module)
        if tree is None:
            return "there is no such module"
        node = _definition(tree, seam.attribute)
        if node is None:
            return "there is no such attribute"
        if seam.parameters is not None:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return "it is no function"
            if isinstance(node, ast.AsyncFunctionDef) != seam.awaited:
                return "it was awaited and is not any more" if seam.awaited else "it is awaited now"
            names = _parameters(node)
            if names[: len(seam.parameters)] != seam.parameters:
                return f"its parameters are ({', '.join(names)}) and were ({', '.join(seam.parameters)}, ...)"
        body = _definition(tree, seam.within) if seam.within else node
        if body is None:
            return f"there is no {seam.within} in its module"
        mentioned = _mentioned(body) if seam.rests_on else frozenset()
        if missing := [name for name in seam.rests_on if name not in mentioned]:
            return f"{seam.within or 'its source'} no longer mentions {', '.join(missing)}"
        return None

    def _path(self, module: str) -> Path | None:
        for directory in self.directories:
            place = Path(directory, *module.split(".")[1:])
            for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                if path.is_file():
                    return path
        return None

    def _tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else _parse(path)


@cache
def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # whoever imports it will hear of it


def _definition(tree: ast.Module, attribute: str) -> ast.AST | None:
    """What binds a name at the top of a module, or in one of its classes: a def, a class, an import or an assignment."""
    scope: ast.AST = tree
    for name in attribute.split("."):
        found = [node for node in _statements(scope) if name in _bound(node)]
        if not found:
            return None
        scope = found[-1]
    return scope


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of a body, those under its if, try and with included."""
    for part in ("body", "handlers", "orelse", "finalbody"):
        for node in getattr(scope, part, ()):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
                yield from _statements(node)


def _bound(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return tuple(alias.asname or alias.name.split(".")[0] for alias in node.names)
    if isinstance(node, ast.Assign):
        return tuple(target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    return tuple(argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _mentioned(tree: ast.AST) -> frozenset[str]:
    """Identifiers, attributes, argument names, imported names and string constants."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(_bound(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return frozenset(found)
