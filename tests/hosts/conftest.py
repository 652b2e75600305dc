"""Engines for the real Miles: the SGLang of its own environment, and a newer one that reports supports."""

import sys
from collections.abc import Iterator

import pytest

from tests.live.conftest import LiveServer, launched_server, sglang_python  # noqa: F401


@pytest.fixture(scope="session")
def engine(model, tmp_path_factory) -> Iterator[LiveServer]:
    """The SGLang that Miles itself would start."""
    with launched_server(sys.executable, model, tmp_path_factory.mktemp("engine")) as launched:
        yield launched


@pytest.fixture
def object_store(ray_cluster):
    """Miles's store, which its driver would choose."""
    from miles.utils import object_store

    object_store._INSTANCE = object_store.RayObjectStore()
    yield object_store._INSTANCE
    object_store._INSTANCE = None


@pytest.fixture(scope="session")
def filtering_engine(model, sglang_python, tmp_path_factory) -> Iterator[LiveServer]:  # noqa: F811
    """SGLang 0.5.23 or newer, of ``MILES_SC_SGLANG_PYTHON``."""
    with launched_server(sglang_python, model, tmp_path_factory.mktemp("filtering_engine")) as launched:
        yield launched
