"""The sizes by which run.gather chooses its ways."""

from __future__ import annotations

import pytest


def patch_sizes(patch: pytest.MonkeyPatch, block: int, mapped: int, sparse: int, long: int) -> None:
    patch.setattr("fsdp_ckpt.run.gather.BLOCK_BYTES", block)
    patch.setattr("fsdp_ckpt.run.gather._MAPPED_BYTES", mapped)
    patch.setattr("fsdp_ckpt.run.gather._SPARSE", sparse)
    patch.setattr("fsdp_ckpt.run.gather._LONG_BYTES", long)
