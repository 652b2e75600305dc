"""Servers that are no SGLang, for faults."""

import json
import sys
from pathlib import Path


def fake_python(folder: Path) -> str:
    """An interpreter for `SglangSettings` that runs `fake_sglang` whatever module it is told to run."""
    program = folder / "fake_python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I {Path(__file__).with_name("fake_sglang.py")} "$@"\n')
    program.chmod(0o755)
    return str(program)


def behaviour(**options: object) -> dict[str, str]:
    """What `fake_sglang` finds in its environment."""
    return {"FAKE_SGLANG": json.dumps(options)}
