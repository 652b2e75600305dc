"""What the start-up hook costs a process that never imports a host.

    python benchmarks/startup.py [--pairs 60]

Three environments that differ in nothing but the hook start one interpreter each, in turn; what is shown is the median of the
paired differences and what it is of a start without the hook.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOOK = ROOT / "miles_sc" / "hosts" / "miles_sc_hosts.pth"
BASE, HOOKED, OFF = "no hook", "hook", "hook, turned off"


def make_environment(folder: Path, *, hooked: bool) -> Path:
    """An environment from which this checkout can be imported; gives its interpreter."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "_checkout.pth").write_text(f"{ROOT}\n")
    if hooked:
        (site_packages / HOOK.name).write_bytes(HOOK.read_bytes())
    return folder / "bin" / "python"


def start_milliseconds(interpreter: Path, switch: str) -> float:
    environment = {"PATH": os.environ["PATH"], "MILES_SC_HOSTS": switch}
    started = time.perf_counter()
    subprocess.run([interpreter, "-c", "pass"], env=environment, check=True)
    return (time.perf_counter() - started) * 1000


def compare(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = make_environment(Path(folder) / "plain", hooked=False)
        hooked = make_environment(Path(folder) / "hooked", hooked=True)
        contenders = {BASE: (plain, ""), HOOKED: (hooked, ""), OFF: (hooked, "off")}
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(pairs + 1):
            for name, contender in contenders.items():
                milliseconds = start_milliseconds(*contender)
                if number > 0:  # the first round compiles what it imports
                    taken[name].append(milliseconds)
    base = statistics.median(taken[BASE])
    print(f"{'interpreter start':24}{'start / no hook':>20}{'cost':>12}")
    for name, starts in taken.items():
        cost = statistics.median(own - other for own, other in zip(starts, taken[BASE], strict=True))
        print(f"  {name:22}{(base + cost) / base:19.2f}x{cost:9.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    compare(parser.parse_args().pairs)


if __name__ == "__main__":
    main()
