"""Files that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """A scratch directory that takes the name ``output`` when the block succeeds, and is removed when it fails.

    Args:
        replace: take the place of a directory that is there, once the new one is whole.

    Raises:
        ValueError: something is there already, and ``replace`` is off.
    """
    if not replace:
        check_free(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        if replace:
            shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def check_free(output: Path) -> None:
    """Refuses a directory that exists and is not empty, or a place that cannot be written."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} exists already: remove it, or name another directory")


def check_writable(directory: Path, flag: str) -> None:
    """Creates a directory and tries to write there; ValueError names the flag."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {directory}: cannot be written ({error.strerror}); give a folder that can") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a text, or leaves what was there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
