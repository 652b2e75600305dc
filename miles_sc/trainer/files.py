"""Files that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(output: Path) -> Iterator[Path]:
    """A scratch directory that takes the name ``output`` when the block succeeds, and is removed when it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a text, or leaves what was there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
