"""Seams checked from a host's source: what passes, and what is said of one that is not as it must be."""

import codecs
import itertools

import pytest

from miles_sc.hosts.seams import Fault, HostSource, Seam

PACKAGE = "pkg"


@pytest.fixture
def check(tmp_path):
    """``check(source, attribute, **seam) -> what was found, or None`` for a seam in a module of that source."""
    numbers = itertools.count()

    def check(source: str | bytes, attribute: str, **given) -> str | None:
        name = f"module_{next(numbers)}"  # what was read once is remembered
        (tmp_path / f"{name}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
        return found_in([tmp_path], Seam(f"{PACKAGE}.{name}", attribute, "it is lost", **given))

    return check


def found_in(directories, seam) -> str | None:
    faults = HostSource([str(directory) for directory in directories]).check([seam])
    assert [fault.seam for fault in faults] in ([], [seam])
    return faults[0].found if faults else None


# --- whether it is there

PLACES = {  # source in which `here` is bound at the top of a module
    "function": "def here(a): pass",
    "coroutine": "async def here(a): pass",
    "class": "class here: pass",
    "value": "here = 1",
    "one of two targets": "other = here = 1",
    "annotated value": "here: dict[str, int] = {}",
    "import": "import here",
    "import under another name": "import json as here",
    "import of a submodule": "import here.there",
    "name from a module": "from pkg.net import here",
    "name from a module under another name": "from .net import post as here",
    "under if": "if True:\n    def here(a): pass",
    "under else": "if True:\n    pass\nelse:\n    def here(a): pass",
    "under elif": "if 0:\n    pass\nelif 1:\n    def here(a): pass",
    "under try": "try:\n    from fast import here\nexcept ImportError:\n    raise",
    "under except": "try:\n    import fast\nexcept ImportError:\n    def here(a): pass",
    "under the else of try": "try:\n    import fast\nexcept ImportError:\n    raise\nelse:\n    here = fast.here",
    "under finally": "try:\n    pass\nfinally:\n    here = 1",
    "under with": "with open('x') as file:\n    here = file.read()",
    "deep": "try:\n    if 1:\n        with x:\n            here = 1\nexcept OSError:\n    raise",
}


@pytest.mark.parametrize("source", PLACES.values(), ids=PLACES)
def test_what_binds_a_name_is_found(check, source):
    assert check(source, "here") is None


ELSEWHERE = {
    "nothing": "",
    "another name": "def there(): pass",
    "only used": "print(here)",
    "inside a function": "def there():\n    here = 1",
    "inside a class": "class There:\n    here = 1",
    "an attribute": "there.here = 1",
    "imported under another name": "from x import here as there",
}


@pytest.mark.parametrize("source", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_binds_it_elsewhere_does_not_count(check, source):
    assert check(source, "here") == "there is no such attribute"


@pytest.mark.parametrize(
    ("attribute", "found"),
    [
        ("Sample.strip", None),
        ("Sample.join", None),
        ("Sample.Inner.deep", None),
        ("Sample.gone", "there is no such attribute"),
        ("Gone.strip", "there is no such attribute"),
        ("Borrowed.strip", "there is no such attribute"),  # written elsewhere, so that place is the seam
        ("strip", "there is no such attribute"),
    ],
)
def test_methods(check, attribute, found):
    source = """
from x import Borrowed
class Sample:
    if True:
        def strip(self, n): pass
    @staticmethod
    def join(a, b): pass
    class Inner:
        def deep(self): pass
"""
    assert check(source, attribute) == found


def test_the_last_of_several_counts(check):
    source = "def here(a): pass\ndef here(a, b): pass"
    assert check(source, "here", parameters=("a", "b")) is None


# --- its parameters


@pytest.mark.parametrize(
    "head",
    [
        "def here(a, b)",
        "def here(a, b, c=1)",
        "def here(a, b, *, c)",
        "def here(a, b, **rest)",
        "def here(a, /, b)",
        "def here(a, *, b=1)",
        "@decorated\ndef here(a: int, b: str = '') -> None",
    ],
)
def test_leading_parameters_are_asked_for_and_more_may_follow(check, head):
    assert check(f"{head}: pass", "here", parameters=("a", "b")) is None


@pytest.mark.parametrize(
    ("head", "awaited", "found"),
    [
        ("async def", True, None),
        ("async def", False, "it is awaited now"),
        ("def", True, "it was awaited and is not any more"),
    ],
)
def test_who_is_awaited(check, head, awaited, found):
    assert check(f"{head} here(a, b): pass", "here", parameters=("a", "b"), awaited=awaited) == found


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("def here(a, c)", "a, c"),
        ("def here(b, a)", "b, a"),
        ("def here(first, a, b)", "first, a, b"),
        ("def here(a)", "a"),
        ("def here(*args, **kwargs)", ""),
    ],
    ids=["renamed", "reordered", "one put before", "one gone", "swallowed"],
)
def test_other_leading_parameters_are_a_fault(check, head, names):
    assert check(f"{head}: pass", "here", parameters=("a", "b")) == f"its parameters are ({names}) and were (a, b, ...)"


@pytest.mark.parametrize("source", ["here = lambda a: a", "from x import here", "class here:\n    def __init__(self, a): pass"])
def test_what_has_parameters_is_a_function(check, source):
    assert check(source, "here", parameters=("a",)) == "it is no function"
    assert check(source, "here") is None


# --- what our side rests on

BODY = """
from pkg.net import post as send

def here(a, url="default"):
    from x import local
    table = {"payload": a.width}
    def inner(): pass
    return send(table, retries=3)

def there():
    return other
"""


@pytest.mark.parametrize("mentioned", ["url", "default", "local", "payload", "width", "table", "inner", "send", "retries"])
def test_names_and_strings_of_its_source_can_be_rested_on(check, mentioned):
    assert check(BODY, "here", rests_on=(mentioned,)) is None


def test_what_is_no_longer_mentioned_is_listed(check):
    assert check(BODY, "here", rests_on=("send", "post", "other")) == "its source no longer mentions post, other"


def test_a_comment_or_part_of_a_string_is_no_mention(check):
    assert check("def here():\n    # payload\n    return 'the payload'", "here", rests_on=("payload",)) is not None


def test_an_assumption_may_lie_in_another_function(check):
    assert check(BODY, "send", within="here", rests_on=("send", "retries")) is None
    assert check(BODY, "send", within="there", rests_on=("send", "other")) == "there no longer mentions send"
    assert check(BODY, "send", within="gone", rests_on=("send",)) == "there is no gone in its module"
    source = "from .net import post\nclass Tracer:\n    def create(self): return post(1)\n    def close(self): pass"
    assert check(source, "post", within="Tracer.create", rests_on=("post",)) is None
    assert check(source, "post", within="Tracer.close", rests_on=("post",)) == "Tracer.close no longer mentions post"


# --- where its source is


def test_modules_and_packages_are_found(tmp_path):
    for name in ("__init__.py", "flat.py", "deep/__init__.py", "deep/inner.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("here = 1")
    for module in ("pkg", "pkg.flat", "pkg.deep", "pkg.deep.inner"):
        assert found_in([tmp_path], Seam(module, "here", "")) is None
    for module in ("pkg.gone", "pkg.flat.inner", "pkg.deep.gone"):
        assert found_in([tmp_path], Seam(module, "here", "")) == "there is no such module"


def test_a_package_hides_a_module_of_its_name(tmp_path):
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "__init__.py").write_text("in_package = 1")
    (tmp_path / "module.py").write_text("in_module = 1")
    assert found_in([tmp_path], Seam("pkg.module", "in_package", "")) is None
    assert found_in([tmp_path], Seam("pkg.module", "in_module", "")) is not None


def test_the_first_of_several_directories_counts(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
        (directory / "module.py").write_text(f"{directory.name} = 1")
    (second / "only.py").write_text("here = 1")
    both = [first, second]
    assert found_in(both, Seam("pkg.module", "first", "")) is None
    assert found_in(both, Seam("pkg.module", "second", "")) is not None
    assert found_in(both, Seam("pkg.only", "here", "")) is None
    assert found_in([], Seam("pkg.module", "first", "")) == "there is no such module"


@pytest.mark.parametrize(
    "source",
    [b"def here(:", b"here = 1\n\xff\xfe", b"here = 1\0", b"print 'two'"],
    ids=["syntax", "encoding", "null", "Python 2"],
)
def test_source_that_cannot_be_read_is_a_fault_and_no_error(check, source):
    assert check(source, "here") is not None


@pytest.mark.parametrize(
    "source",
    [codecs.BOM_UTF8 + b"here = 1", "# -*- coding: latin-1 -*-\nhere = 'é'".encode("latin-1"), b"here = 1\r\n"],
    ids=["byte order mark", "declared encoding", "carriage returns"],
)
def test_source_is_read_as_python_reads_it(check, source):
    assert check(source, "here") is None


def test_what_a_module_mentions(tmp_path):
    (tmp_path / "module.py").write_text("parser.add('--flag', choices=[x])")
    source = HostSource([str(tmp_path)])
    assert source.mentions("pkg.module") == {"parser", "add", "--flag", "choices", "x"}
    assert source.mentions("pkg.gone") == frozenset()
    assert source.has("pkg.module") and not source.has("pkg.gone")


# --- what is said


def test_every_seam_at_fault_is_reported_and_no_other(tmp_path):
    (tmp_path / "module.py").write_text("def one(a): pass\ndef two(a): pass")
    seams = [
        Seam("pkg.module", "one", "a"),
        Seam("pkg.module", "gone", "b"),
        Seam("pkg.gone", "one", "c"),
        Seam("pkg.module", "two", "d"),
    ]
    assert [fault.seam for fault in HostSource([str(tmp_path)]).check(seams)] == seams[1:3]


def test_a_fault_names_place_finding_and_consequence():
    fault = Fault(Seam("pkg.module", "Sample.strip", "rows no longer match tokens"), "there is no such attribute")
    assert str(fault) == "pkg.module.Sample.strip: there is no such attribute; without it rows no longer match tokens"
