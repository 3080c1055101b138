from __future__ import annotations

from typing import Any

import pytest

from fsdp_ckpt.config.fsdp import FSDPConfig
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.train.sharding.origin import Holding, Origin, choose_origin


def _holding(num_meta: int, *, parallel: bool = False) -> Holding:
    return Holding(num_tensors=4, num_meta=num_meta, example="a.weight" if num_meta else "", parallel=parallel)


ALL, SOME, NONE = _holding(4), _holding(1), _holding(0)
OWN = {"cpu_ram_efficient_loading": False}


@pytest.mark.parametrize(
    ("options", "holdings", "given", "origin"),
    [
        ({}, [NONE, NONE], "", Origin.FIRST),
        ({}, [NONE, ALL], "", Origin.FIRST),
        ({}, [NONE, SOME], "", Origin.FIRST),
        ({}, [NONE, ALL], "initialize", Origin.FIRST),
        (OWN, [NONE, NONE], "", Origin.OWN),
        ({"fsdp_version": 1, **OWN}, [NONE, NONE], "", Origin.FIRST),
        ({"fsdp_version": 1, **OWN, "sync_module_states": False}, [NONE, NONE], "", Origin.OWN),
        ({}, [_holding(0, parallel=True)] * 2, "", Origin.OWN),
        (OWN, [ALL, ALL], "", Origin.MADE),
        ({}, [ALL, ALL], "initialize", Origin.MADE),
        ({}, [SOME, ALL], "initialize", Origin.MADE),
        ({}, [ALL, NONE], "weights", Origin.FILE),
        (OWN, [_holding(4, parallel=True)] * 2, "weights", Origin.FILE),
    ],
)
def test_origin(options: dict[str, Any], holdings: list[Holding], given: str, origin: Origin) -> None:
    config = FSDPConfig.of(options)
    found = choose_origin(config, holdings, has_weights=given == "weights", has_initialize=given == "initialize")
    assert found is origin


@pytest.mark.parametrize(
    ("options", "holdings", "text"),
    [
        ({}, [ALL, ALL], "rank 0: `a.weight` and 3 more tensors are on the meta device"),
        ({}, [SOME, NONE], "rank 0: `a.weight` is on the meta device"),
        (OWN, [SOME, SOME], "rank 0: `a.weight` is on the meta device"),
        (OWN, [ALL, NONE], "rank 0: `a.weight` and 3 more"),
        (OWN, [NONE, NONE, SOME], "rank 2: `a.weight` is on the meta device, and cpu_ram_efficient_loading is false"),
        ({}, [_holding(4, parallel=True)] * 2, "tensor-parallel already"),
    ],
)
def test_no_origin(options: dict[str, Any], holdings: list[Holding], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        choose_origin(FSDPConfig.of(options), holdings, has_weights=False, has_initialize=False)
