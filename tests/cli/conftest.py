from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    client = Sandbox()
    yield client
    client.close()
