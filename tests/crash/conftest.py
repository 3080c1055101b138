from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.save_yard import Yard
from tests.hostile.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    client = Sandbox()
    yield client
    client.close()


@pytest.fixture(scope="session")
def _yard() -> Iterator[Yard]:
    server = Yard()
    yield server
    server.close()


@pytest.fixture
def yard(_yard: Yard) -> Iterator[Yard]:
    """Real gloo ranks that save as they are told; those of a test end with it."""
    yield _yard
    _yard.end_teams()
    print(_yard.told())
