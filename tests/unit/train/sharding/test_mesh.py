from __future__ import annotations

from typing import Any

import pytest

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.mesh import mesh_shape

HYBRID = {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD"}


@pytest.mark.parametrize(
    ("options", "world", "of_node", "shape"),
    [
        ({}, 8, 4, (8,)),
        ({"dp_shard_size": 8}, 8, None, (8,)),
        ({"fsdp_version": 1}, 8, 4, (8,)),
        ({"fsdp_version": 1, "sharding_strategy": "NO_SHARD"}, 8, 4, (8,)),
        ({"dp_replicate_size": 2}, 8, 8, (2, 4)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, 8, None, (2, 4)),
        ({"dp_replicate_size": 8}, 8, None, (8, 1)),
        (HYBRID, 8, 4, (2, 4)),
        (HYBRID, 8, None, (1, 8)),
        (HYBRID, 1, 1, (1, 1)),
        ({**HYBRID, "dp_shard_size": 2}, 8, 4, (4, 2)),
        ({**HYBRID, "dp_replicate_size": 4}, 8, 4, (4, 2)),
        ({**HYBRID, "dp_replicate_size": 4, "dp_shard_size": 2}, 8, 8, (4, 2)),
    ],
)
def test_shape(options: dict[str, Any], world: int, of_node: int | None, shape: tuple[int, ...]) -> None:
    assert mesh_shape(FSDPConfig.of(options), world, of_node) == shape


@pytest.mark.parametrize(
    ("options", "world", "of_node", "text"),
    [
        ({"dp_shard_size": 4}, 8, None, "1 x 4 = 4, but there are 8 ranks"),
        ({"dp_replicate_size": 3}, 8, None, "3 x 2 = 6, but there are 8 ranks"),
        ({"dp_replicate_size": 16}, 8, None, "16 x 1 = 16, but there are 8 ranks"),
        ({"dp_replicate_size": 2, "dp_shard_size": 8}, 8, None, "2 x 8 = 16, but there are 8 ranks"),
        (HYBRID, 8, 3, "2 x 3 = 6, but there are 8 ranks"),
        (HYBRID, 8, 1, "8 copies of 1 rank each"),
        ({**HYBRID, "dp_replicate_size": 8}, 8, 8, "8 copies of 1 rank each"),
        ({"tp_size": 2, "cp_size": 4}, 8, None, "tp_size: 2, cp_size: 4 needs a mesh"),
    ],
)
def test_no_shape(options: dict[str, Any], world: int, of_node: int | None, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        mesh_shape(FSDPConfig.of(options), world, of_node)
