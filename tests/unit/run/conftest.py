"""Sizes at which small tensors take the ways of large ones."""

from __future__ import annotations

import pytest

from tests.unit.run.sizes import patch_sizes


@pytest.fixture(params=["as they are", "tiny blocks", "small blocks", "tiny maps", "small maps", "rows"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors take the ways of large ones."""
    never = 1 << 30
    chosen = {
        "tiny blocks": (1, 1, never, never), "small blocks": (50, 1, never, never),
        "tiny maps": (1, 1, 1, never), "small maps": (50, 50, 1, never), "rows": (50, 50, never, 1),
    }  # fmt: skip
    if request.param in chosen:
        patch_sizes(monkeypatch, *chosen[request.param])
