"""The hook at the start of an interpreter: in the wheel, light, switched off by a variable, and seen by a host's import."""

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "miles_sc" / "hosts" / "miles_sc_hosts.pth"
# What `site` does with a .pth file in site-packages, wherever the tests run and whatever is installed there.
RUN_HOOK = "site.addsitedir(os.environ['HOOKED_SITE']); "
WATCHING = "from miles_sc.hosts.startup import HostWatcher, is_watching; print(is_watching(), sys.meta_path.count(HostWatcher))"
HOST_ARGUMENTS = """
import argparse
def read():
    parser = argparse.ArgumentParser(prog="host")
    parser.add_argument("--loss-type", choices=["policy_loss"], default="policy_loss")
    return parser.parse_args().loss_type
"""
READ = "import miles.utils.arguments as host; from miles_sc.hosts.activation import activation; active = activation('miles'); "


@pytest.fixture
def start(tmp_path):
    """``start(script, *arguments, interpreter=, **environment)``: a new interpreter that can import from ``tmp_path``."""
    site = tmp_path / "site"
    site.mkdir()
    (site / HOOK.name).write_bytes(HOOK.read_bytes())

    def start(script: str, *arguments: str, interpreter: tuple[str, ...] = (), **environment: str):
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "HOOKED_SITE": str(site), "MILES_SC_HOSTS": "", **environment}
        command = [sys.executable, *interpreter, "-c", f"import os, site, sys; {script}", *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return start


def printed(run: subprocess.CompletedProcess) -> str:
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


@pytest.fixture
def write_module(tmp_path):
    """``write_module("miles.utils.arguments", source)``, and the packages above it."""

    def write_module(name: str, source: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        for folder in [parent for parent in path.parents if parent.is_relative_to(tmp_path) and parent != tmp_path]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(source)

    return write_module


# --- the hook itself


def test_a_wheel_puts_it_where_site_packages_reads_it(tmp_path):
    if find_spec("hatchling") is None or find_spec("pip") is None:
        pytest.skip("building a wheel here needs pip and hatchling")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if "/" not in name] == [HOOK.name]
        assert archive.read(HOOK.name) == HOOK.read_bytes()
        assert "miles_sc/hosts/startup.py" in archive.namelist()


def test_it_watches_once_however_often_it_is_run(start):
    assert printed(start(RUN_HOOK * 2 + "import miles_sc.hosts.startup as hook; hook.watch(); " + WATCHING)) == "True 1"


@pytest.mark.parametrize("word", ["off", "0", "false", "no", " OFF ", "False"])
def test_a_variable_turns_it_off(start, word):
    assert printed(start(RUN_HOOK + WATCHING, MILES_SC_HOSTS=word)) == "False 0"


@pytest.mark.parametrize("word", ["", "on", "1", "true"])
def test_other_words_leave_it_on(start, word):
    assert printed(start(RUN_HOOK + WATCHING, MILES_SC_HOSTS=word)) == "True 1"


def test_it_imports_nothing_but_itself(start):
    script = f"before = {{*sys.modules}}; {RUN_HOOK} print(*sorted({{*sys.modules}} - before))"
    run = start(script, interpreter=("-S",))  # or the hooks of this environment would have imported it all before
    assert printed(run).split() == ["miles_sc", "miles_sc.hosts", "miles_sc.hosts.startup"]


def test_other_imports_do_not_wake_it(start):
    script = RUN_HOOK + "import json.tool, wave, xml; print([name for name in sys.modules if name.startswith('miles_sc')])"
    assert printed(start(script)) == "['miles_sc', 'miles_sc.hosts', 'miles_sc.hosts.startup']"


# --- packages by the name of a host


@pytest.mark.parametrize("package", ["miles", "slime"])
@pytest.mark.parametrize("module", ["{}", "{}.distance"])
def test_a_stranger_is_left_alone(start, write_module, package, module):
    name = module.format(package)
    write_module(name, "def walked(): return 7")
    script = f"import {name} as stranger; from miles_sc.hosts.activation import activation; "
    run = start(RUN_HOOK + script + f"print(stranger.walked(), activation('{package}'))", "--loss-type", "score_centering")
    assert printed(run) == "7 None"


def test_an_unknown_host_works_as_ever(start, write_module):
    write_module("miles.utils.arguments", HOST_ARGUMENTS)
    script = READ + "print(host.read(), len(active.faults) == len(active.seams) > 40, active.installed)"
    assert printed(start(RUN_HOOK + script)) == "policy_loss True []"


def test_we_bring_no_torch_to_processes_of_a_host_that_use_none(start, write_module):
    write_module("miles.utils.arguments", HOST_ARGUMENTS)
    assert printed(start(RUN_HOOK + READ + "print(active is not None, 'torch' in sys.modules)")) == "True False"


def test_our_flags_on_an_unknown_host_are_explained(start, write_module):
    write_module("miles.utils.arguments", HOST_ARGUMENTS)
    run = start(RUN_HOOK + READ, "--loss-type", "score_centering")
    assert run.returncode == 1 and "ValueError: score centering cannot enter this miles (version" in run.stderr
    wanted = "  miles.utils.arguments.get_miles_extra_args_provider: there is no such attribute; without it the flags are unknown"
    assert wanted in run.stderr.splitlines()


def test_turned_off_our_flags_are_unknown_to_a_host_as_ever(start, write_module):
    write_module("miles.utils.arguments", HOST_ARGUMENTS)
    words = ("--loss-type", "score_centering")
    run = start(RUN_HOOK + READ + "print(active); host.read()", *words, MILES_SC_HOSTS="off")
    assert (run.returncode, run.stdout) == (2, "None\n") and "invalid choice: 'score_centering'" in run.stderr


# --- what it costs


def test_the_benchmark_runs():
    command = [sys.executable, str(ROOT / "benchmarks" / "startup.py"), "--pairs", "1"]
    lines = printed(subprocess.run(command, capture_output=True, text=True, timeout=120)).splitlines()
    assert [line[:24].strip() for line in lines] == ["interpreter start", "no hook", "hook", "hook, turned off"]
    assert lines[1].split()[-3:] == ["1.00x", "0.00", "ms"]
