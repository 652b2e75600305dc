"""Freed memory back to the operating system."""

import ctypes


def return_memory() -> None:
    """Hands free pages back where the C library can (glibc).

    Recorded arrays are smaller than what glibc maps apart, so that freed ones would stay in the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
