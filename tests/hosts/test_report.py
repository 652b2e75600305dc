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
from miles_sc.hosts.activation import deactivate, known_host
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


@pytest.mark.parametrize(
    ("variable", "remedy"), [("off", "unset MILES_SC_HOSTS (= off)"), (None, "install the package with pip")]
)
def test_a_hook_that_is_off(variable, remedy):
    """Asked in an interpreter that has read no site-packages: the question must not turn the hook on."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}; from miles_sc.hosts.report import print_host; "
        "from rich.console import Console; sys.exit(print_host('miles', Console(soft_wrap=True)))"
    )
    environment = {name: value for name, value in os.environ.items() if name != startup.SWITCH}
    if variable is not None:
        environment[startup.SWITCH] = variable
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "hook is OFF" in done.stdout and remedy in done.stdout, done.stderr


def test_a_host_with_a_loss_that_we_do_not_take_over(tmp_path, monkeypatch):
    """A later Slime."""
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    for folder in ("slime", "slime/utils"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "slime" / "utils" / "arguments.py").write_text("CHOICES = ['policy_loss', 'score_centering']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [startup.HostWatcher, *sys.meta_path])
    try:
        status, text = told("slime")
    finally:
        deactivate("slime")
        for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
            del sys.modules[name]
    assert status == 0 and "a score_centering loss of its own, which trains; the plugin stays out" in text
    assert "enters here" not in text


@needs_miles
def test_the_real_miles_here_and_in_a_worker(ray_cluster):
    status, text = told("miles")
    assert status == 0 and "0 at fault: the plugin enters here" in text and "enters it there" in text


def test_the_page_says_how_many_seams_there_are():
    page = (Path(__file__).parents[2] / "docs" / "miles.md").read_text()
    assert f"`{len(known_host('miles').seams)} seams, 0 at fault: the plugin enters here`" in page
