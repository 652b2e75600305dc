"""Watches for a host being imported. Runs at the start of every interpreter of this environment, so it is next to nothing.

``miles_sc_hosts.pth`` in site-packages calls :func:`watch`. What it leaves behind is one entry on ``sys.meta_path``, which
imports the plugin when a host appears and finds no module itself. ``MILES_SC_HOSTS=off`` in the environment keeps it away.
"""

import os
import sys

SWITCH = "MILES_SC_HOSTS"
HOSTS = ("miles", "slime")


class HostWatcher:
    """A finder that finds nothing, and activates the plugin for a host just before that is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in HOSTS:
            from miles_sc.hosts.activation import activate

            activate(name)


def is_watching() -> bool:
    """Whether a host imported from now on in this process is noticed."""
    return HostWatcher in sys.meta_path


def watch() -> None:
    """Idempotent; does nothing where the environment says off."""
    if os.environ.get(SWITCH, "").strip().lower() not in ("off", "0", "false", "no") and not is_watching():
        sys.meta_path.insert(0, HostWatcher)
