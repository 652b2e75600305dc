"""``miles-sc doctor --host``: what it says of a host, and its exit status."""

import importlib.util
import io

import pytest
from rich.console import Console

from miles_sc.hosts import startup
from miles_sc.hosts.report import print_host
from tests.hosts.miles_host import needs_miles


def told(package):
    console = Console(file=io.StringIO(), width=200)
    return print_host(package, console), console.file.getvalue()


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="Slime is installed in this environment")
def test_a_host_that_is_not_there(monkeypatch):
    startup.watch()
    status, text = told("slime")
    assert status == 1 and "slime cannot be imported here" in text


def test_a_hook_that_is_off(monkeypatch):
    monkeypatch.setattr(startup, "is_watching", lambda: False)
    status, text = told("miles")
    assert status == 1 and "hook is OFF" in text and "unset MILES_SC_HOSTS" in text


@needs_miles
def test_the_real_miles_here_and_in_a_worker(ray_cluster):
    status, text = told("miles")
    assert status == 0 and "0 at fault: the plugin enters here" in text and "enters it there" in text
