"""``miles-sc doctor --host``: what it says of a host, and its exit status."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from miles_sc.hosts import startup
from miles_sc.hosts.activation import known_host
from miles_sc.hosts.report import print_host
from tests.hosts.miles_host import needs_miles


def told(package):
    console = Console(file=io.StringIO(), width=200)
    return print_host(package, console), console.file.getvalue()


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="Slime is installed in this environment")
def test_a_host_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [startup.HostWatcher, *sys.meta_path])
    status, text = told("slime")
    assert status == 1 and "slime cannot be imported here" in text


def told_elsewhere(package, *interpreter, path=(), **environment):
    """The same in an interpreter of its own, where nothing has been imported."""
    program = (
        f"import sys; sys.path[:0] = {[*map(str, path), *sys.path]!r}; from miles_sc.hosts.report import print_host; "
        f"from rich.console import Console; sys.exit(print_host({package!r}, Console(soft_wrap=True)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != startup.SWITCH} | environment
    done = subprocess.run(
        [sys.executable, *interpreter, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("environment", "remedy"), [({startup.SWITCH: "off"}, "unset MILES_SC_HOSTS (= off)"), ({}, "install the package with pip")]
)
def test_a_hook_that_is_off(environment, remedy):
    """Asked in an interpreter that has read no site-packages: the question must not turn the hook on."""
    status, text = told_elsewhere("miles", "-S", **environment)
    assert status == 1 and "hook is OFF" in text and remedy in text


def test_a_host_with_a_loss_that_we_do_not_take_over(tmp_path):
    """A later Slime."""
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    for folder in ("slime", "slime/utils"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "slime" / "utils" / "arguments.py").write_text("CHOICES = ['policy_loss', 'score_centering']\n")
    (tmp_path / "sitecustomize.py").write_text("from miles_sc.hosts import startup\nstartup.watch()\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])  # wherever the tests run, and whatever hook is installed there
    status, text = told_elsewhere("slime", path=[tmp_path], PYTHONPATH=path)
    assert status == 0 and "a score_centering loss of its own, which trains; the plugin stays out" in text
    assert "enters here" not in text


@needs_miles
def test_the_real_miles_here_and_in_a_worker(ray_cluster):
    status, text = told("miles")
    assert status == 0 and "0 at fault: the plugin enters here" in text and "enters it there" in text


def test_the_page_says_how_many_seams_there_are():
    page = (Path(__file__).parents[2] / "docs" / "miles.md").read_text()
    assert f"`{len(known_host('miles').seams)} seams, 0 at fault: the plugin enters here`" in page
