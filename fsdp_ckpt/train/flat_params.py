"""FSDP1: which elements of which parameter this rank's flat parameters hold.

A unit of FSDP1 flattens its parameters into one, and each rank has a run of it. Those runs are stored and loaded as
they are, as boxes of the named parameters; nothing is gathered for that, unlike with ``FSDP.state_dict``.

The attributes used here are those of ``torch/distributed/fsdp/_flat_param.py``, the same from torch 2.1 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.names import FLAT_PARAM, strip_wrappers
from fsdp_ckpt.train.live import LiveTensor, ParamSlot, Piece, Span, flat_pieces, takes_turn

__all__ = ["FlatUnit", "find_units", "has_fsdp1"]


def has_fsdp1(model: nn.Module) -> bool:
    """Tell whether a module, or one in it, is wrapped by FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A parameter in a flat parameter, and the run of it that this rank has (none: ``numel`` is 0)."""

    name: str
    shape: Shape
    order: tuple[int, ...] | None
    aliases: Sequence[str]
    in_local: int
    start: int
    numel: int


class FlatUnit:
    """One flat parameter.

    Args:
        prefix: Name of its module within the model, with a trailing dot; ``""`` for the root.
        module: The FSDP module.
        others: Further names of the same module, likewise.
    """

    def __init__(self, prefix: str, module: FullyShardedDataParallel, others: Sequence[str] = ()) -> None:
        self.prefix = prefix
        self._others = others
        handle: Any = module._handle
        self._handle = handle
        self._flat: Any = handle.flat_param
        if any(extension is not None for extension in self._flat._param_extensions):
            raise Incompatible(
                f"the FSDP1 unit `{prefix.rstrip('.') or 'root'}` holds DTensors (tensor parallelism under FSDP1)",
                hint="use FSDP2 (fully_shard) for models that are tensor-parallel as well",
            )
        self.strategy: str = handle._sharding_strategy.name
        self.copy, self.copies = _copy_number(module, handle)
        self._named = list(self._describe())

    def _describe(self) -> Iterator[_Named]:
        flat = self._flat
        aliases: dict[str, list[str]] = {}
        for shared in flat._shared_param_infos:
            kept = self._full(shared.prim_module_name, shared.prim_param_name)
            aliases.setdefault(kept, []).append(self._full(shared.module_name, shared.param_name))
        rows = zip(flat._fqns, flat._shapes, flat._strides, flat._contiguities, flat._shard_param_infos, strict=True)
        for fqn, shape, strides, is_contiguous, info in rows:
            name = self._full("", fqn)
            order = None
            if not is_contiguous:
                order = tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim]))
            yield _Named(
                name=name,
                shape=tuple(shape),
                order=order,
                aliases=[*aliases.get(name, ()), *(strip_wrappers(other + fqn) for other in self._others)],
                in_local=info.offset_in_shard or 0,
                start=info.intra_param_start_idx or 0,
                numel=info.numel_in_shard if info.in_shard else 0,
            )

    def _full(self, module_name: str, param_name: str) -> str:
        return strip_wrappers(self.prefix + (f"{module_name}.{param_name}" if module_name else param_name))

    def local(self) -> Tensor:
        """Return this rank's run of the flat parameter, with its padding, 1-D."""
        shard = getattr(self._flat, "_local_shard", None)
        found: Tensor = self._flat.data if shard is None else shard
        return found.detach()

    @property
    def writes(self) -> bool:
        """Whether this rank stores its run: one of the copies does, another one for each unit."""
        return takes_turn(self.prefix, self.copy, self.copies)

    def tensors(self) -> Iterator[LiveTensor]:
        """Yield the named parameters with what this rank holds of them."""
        local = self.local()
        for named in self._named:
            pieces = _run(named, local[named.in_local : named.in_local + named.numel])
            if 0 in named.shape and self._handle.rank == 0:
                pieces = [
                    Piece(offsets=(0,) * len(named.shape), lengths=named.shape, tensor=local[:0].view(named.shape))
                ]
            yield LiveTensor(
                name=named.name,
                shape=named.shape,
                dtype=local.dtype,
                pieces=pieces,
                writes=self.writes,
                aliases=named.aliases,
            )

    def flat_tensor(self) -> LiveTensor:
        """Return the flat parameter itself, without padding, as FSDP1's LOCAL_STATE_DICT stores it."""
        local = self.local()
        total = math.prod(self._flat._unpadded_unsharded_size)
        start = 0 if not self._handle.uses_sharded_strategy else local.numel() * self._handle.rank
        numel = max(min(local.numel(), total - start), 0)
        piece = Piece(offsets=(start,), lengths=(numel,), tensor=local[:numel])
        return LiveTensor(
            name=self.prefix + FLAT_PARAM,
            shape=(total,),
            dtype=local.dtype,
            pieces=[piece] if numel else [],
            writes=True,
        )

    @property
    def used_elements(self) -> int:
        """Elements up to the end of the last parameter; what follows is padding, which depends on the world size."""
        total, used = 0, 0
        for numel, is_padding in zip(self._flat._numels_with_padding, self._flat._is_padding_mask, strict=True):
            total += numel
            used = used if is_padding else total
        return used

    def slots(self) -> Iterator[ParamSlot]:
        """Yield what an optimizer may hold: the flat parameter, or the original ones (use_orig_params)."""
        if self._flat._params is None:
            # Also those of which this rank has nothing: its padding gets state as well, which torch expects.
            spans = [self._span(named, in_flat=True) for named in self._named]
            names = [named.name for named in self._named]
            yield ParamSlot(param=self._flat, spans=spans, names=names, writes=self.writes, local=self.local)
            return
        for named, param in zip(self._named, self._flat._params, strict=True):
            spans = [self._span(named, in_flat=False)] if named.numel else []
            yield ParamSlot(param=param, spans=spans, names=[named.name], writes=self.writes)

    def _span(self, named: _Named, *, in_flat: bool) -> Span:
        length = self.local().numel()
        return Span(
            name=named.name,
            shape=named.shape,
            cut=partial(_cut, named, length if in_flat else None),
            is_owner=self.writes and named.start == 0 and named.numel > 0,
        )

    def reshard(self) -> None:
        """Free gathered parameters, so that the next forward pass gathers what was loaded."""
        if self._handle.uses_sharded_strategy and hasattr(self._flat, "_local_shard"):
            self._handle.reshard(True)
            self._handle.post_reshard()


def find_units(model: nn.Module) -> list[FlatUnit]:
    """Return all flat parameters of a model, in the order of its modules."""
    prefixes: dict[FullyShardedDataParallel, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            prefixes.setdefault(module, []).append(strip_wrappers(f"{name}.") if name else "")
    return [FlatUnit(names[0], module, names[1:]) for module, names in prefixes.items()]


def _copy_number(module: FullyShardedDataParallel, handle: Any) -> tuple[int, int]:
    """Return which copy of the unit's runs this rank holds, and how many copies there are."""
    if not handle.uses_sharded_strategy:
        return dist.get_rank(module.process_group), dist.get_world_size(module.process_group)
    between = getattr(module, "_inter_node_pg", None)
    return (0, 1) if between is None else (dist.get_rank(between), dist.get_world_size(between))


def _run(named: _Named, local: Tensor) -> list[Piece]:
    return flat_pieces(named.shape, named.start, local, named.order)


def _cut(named: _Named, flat_length: int | None, moment: Tensor) -> list[Piece] | None:
    """Cut a moment: laid out like the flat shard, like the run of one parameter, or like the whole parameter."""
    moment = moment.detach()
    if flat_length is not None:
        if tuple(moment.shape) != (flat_length,):
            return None
        return _run(named, moment[named.in_local : named.in_local + named.numel])
    if tuple(moment.shape) == (named.numel,):
        return _run(named, moment)
    if tuple(moment.shape) == named.shape:
        return [Piece(offsets=(0,) * moment.dim(), lengths=named.shape, tensor=moment)]
    return None
