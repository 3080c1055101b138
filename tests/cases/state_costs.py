"""What a save costs: the bytes that travel between ranks, and the memory that each needs meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_ckpt
from tests.cases import models
from tests.cases.state_training import mesh, shard
from tests.dist.stage import scenario


class Traffic(TorchDispatchMode):
    """Counts the bytes of tensors that collectives and sends of this rank touch, whatever calls them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensor_bytes = 0
        self.object_bytes = 0
        self._in_object = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"):
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if self._in_object:
                self.object_bytes += num_bytes
            else:
                self.tensor_bytes += num_bytes
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count; what is pickled into tensors (statuses, places of boxes) is kept apart."""
        with ExitStack() as stack:
            for name in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"):
                stack.enter_context(mock.patch.object(dist, name, self._marked(getattr(dist, name))))
            stack.enter_context(self)
            yield

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._in_object = True
            try:
                return function(*args, **kwargs)
            finally:
                self._in_object = False

        return run


@scenario(ranks=2)
def p32_traffic(place: Path) -> dict[str, int]:
    """What travels between ranks, and what a save needs of memory beyond the shards that are there anyway."""
    rows, grid = 4096 // 2, mesh()
    large = nn.ParameterDict(
        {name: nn.Parameter(DTensor.from_local(torch.full((rows, 4096), 1.0), grid, [Shard(0)])) for name in "ab"}
    )
    fsdp_ckpt.save_state(place / "warm", shard(models.Mlp()))
    sharded, whole = Traffic(), Traffic()
    before = _memory("VmRSS", reset_peak=True)
    fsdp_ckpt.save_state(place / "large", large, rng=False)
    extra = _memory("VmHWM") - before
    before = _memory("VmRSS", reset_peak=True)
    assert torch.full((2 * rows, 4096), 2.0).sum() > 0  # as large as this rank's shard
    extra_of_copy = _memory("VmHWM") - before
    with sharded.counting():
        fsdp_ckpt.save_state(place / "large", large, rng=False, durable=False)
    model = shard(models.Mlp())
    with whole.counting():
        fsdp_ckpt.save_state(place / "full", model, rng=False, state_dict_type="FULL_STATE_DICT")
    size = sum(file.stat().st_size for file in (place / "large").rglob("*.distcp"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(place / "large")
    return {
        "tensor bytes": sharded.tensor_bytes,
        "object bytes": sharded.object_bytes,
        "tensor bytes of a full save": whole.tensor_bytes,
        "extra memory": extra,
        "extra memory of a copy": extra_of_copy,
        "size": size,
    }


def _memory(field: str, *, reset_peak: bool = False) -> int:
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024
