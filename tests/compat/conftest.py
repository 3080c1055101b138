"""A tiny Llama, saved once per session by FSDP1, FSDP2 and Accelerate's functions on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.launch import build_once, run_module


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME/ is what Accelerate saved, NAME.safetensors the model before it was wrapped; names in `llama_ranks`."""
    return build_once(tmp_path_factory, "llama", lambda out: run_module("tests.compat.llama_ranks", str(out)))
