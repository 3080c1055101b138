"""What a model holds on this rank: FSDP1, FSDP2 with or without tensor parallelism, DDP, or a plain module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parallel import DistributedDataParallel

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.names import is_flat_param, strip_wrappers
from fsdp_ckpt.train.flat_params import FlatUnit, find_units, has_fsdp1
from fsdp_ckpt.train.live import LiveTensor, ParamSlot, Piece, Span, dtensor_pieces, plain, takes_turn, whole
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["LiveModel", "collect_model", "is_sharded", "refuse_meta", "settle"]


@dataclass(kw_only=True)
class LiveModel:
    """A model as one rank sees it.

    Attributes:
        module: The model, without DDP.
        kind: ``FSDP1``, ``FSDP2``, ``DTensor`` (tensor parallelism alone), ``DDP`` or ``plain``.
        tensors: Parameters and persistent buffers by name.
        slots: What optimizers may hold, by ``id`` of the parameter.
        extra: Values of ``get_extra_state``, and the modules that they came from, by name.
        copies: Tensors that a hook of ``state_dict`` made: writing into them does not reach the module.
        unsaved_buffers: Buffers that are not persistent, by name.
        units: FSDP1's flat parameters.
        facts: For the manifest: mesh, sharding strategy.
        differs: Whether ranks have different parts of the model; known after ``settle``.
        elsewhere: Names that only other ranks have.
    """

    module: nn.Module
    kind: str
    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    slots: dict[int, ParamSlot] = field(default_factory=dict)
    extra: dict[str, tuple[nn.Module, Any]] = field(default_factory=dict)
    copies: dict[str, Tensor] = field(default_factory=dict)
    unsaved_buffers: dict[str, Tensor] = field(default_factory=dict)
    units: Sequence[FlatUnit] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    differs: bool = False
    elsewhere: set[str] = field(default_factory=set)

    def names(self) -> dict[str, str]:
        """Return the name of the tensor by each of its names, aliases included."""
        found = {name: name for name in self.tensors}
        for tensor in self.tensors.values():
            found |= dict.fromkeys(tensor.aliases, tensor.name)
        return found

    def before_write(self) -> None:
        """Get the model ready to be written into."""
        for unit in self.units:
            unit.reshard()

    def after_write(self) -> None:
        """Hand back what a hook of ``state_dict`` had copied."""
        if self.copies:
            self.module.load_state_dict(self.copies, strict=False)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ranks may hold shards of a module."""
    return has_fsdp1(model) or any(isinstance(value, DTensor) for value in (*model.parameters(), *model.buffers()))


def collect_model(model: nn.Module, ranks: Ranks) -> LiveModel:
    """Find out what this rank holds of a model. Nothing is copied, gathered or changed.

    Raises:
        Incompatible: A tensor that cannot be stored: a pending reduction, a quantised dtype.
    """
    kind = "plain"
    # torch.compile, in any order; FSDP1 and checkpoint_wrapper hand out the attributes of what they wrap as theirs
    while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
        if isinstance(model, DistributedDataParallel):
            kind = "DDP"
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
        model = inner
    live = LiveModel(module=model, kind=kind)
    if has_fsdp1(model):
        _collect_fsdp1(live, ranks)
    else:
        _collect_state_dict(live, ranks)
    for name, module in model.named_modules():
        prefix = strip_wrappers(f"{name}.") if name else ""
        for buffer_name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(buffer_name)
            if buffer is not None:
                live.unsaved_buffers[prefix + buffer_name] = buffer
    return live


def _collect_fsdp1(live: LiveModel, ranks: Ranks) -> None:
    live.kind = "FSDP1"
    live.units = find_units(live.module)
    managed: set[int] = set()
    for unit in live.units:
        for tensor in unit.tensors():
            live.tensors[tensor.name] = tensor
        for slot in unit.slots():
            live.slots[id(slot.param)] = slot
            managed.add(id(slot.param))
    strategies = sorted({unit.strategy for unit in live.units})
    live.facts = {"sharding_strategy": strategies[0] if len(strategies) == 1 else strategies}
    known = live.names()
    seen: dict[int, str] = {}
    for name, value in _unmanaged(live.module, managed):
        if name in known:
            continue
        kept = seen.setdefault(id(value), name)
        if kept != name:
            tensor = live.tensors[kept]
            live.tensors[kept] = replace(tensor, aliases=(*tensor.aliases, name))
        else:
            _add(live, name, value, ranks)
    for name, module in live.module.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            key = strip_wrappers(f"{name}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip("."))
            live.extra[key] = (module, module.get_extra_state())


def _unmanaged(model: nn.Module, managed: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters outside of all flat parameters, and persistent buffers."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        for name, param in module._parameters.items():
            if param is not None and id(param) not in managed and not is_flat_param(name):
                yield strip_wrappers(prefix + name), param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield strip_wrappers(prefix + name), buffer


def _collect_state_dict(live: LiveModel, ranks: Ranks) -> None:
    own = {id(value) for value in (*live.module.parameters(), *live.module.buffers())}
    seen: dict[int, str] = {}
    state: Mapping[str, Any] = live.module.state_dict(keep_vars=True)
    own |= {id(value) for value in live.module.parameters()}  # FSDP2 has sharded them by now
    for key, value in state.items():
        name = strip_wrappers(key)
        if key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:
            live.extra[name] = (_owner(live.module, key), value)
            continue
        kept = seen.setdefault(id(value), name)
        if kept != name:
            tensor = live.tensors[kept]
            live.tensors[kept] = replace(tensor, aliases=(*tensor.aliases, name))
            continue
        if id(value) not in own:
            live.copies[key] = value
        _add(live, name, value, ranks)
    if any(isinstance(module, FSDPModule) for module in live.module.modules()):
        live.kind = "FSDP2"
    elif any(isinstance(value, DTensor) for value in state.values()):
        live.kind = "DTensor"
    sharded = [value for value in state.values() if isinstance(value, DTensor)]
    if sharded:
        mesh = max((value.device_mesh for value in sharded), key=lambda mesh: (mesh.ndim, mesh.size()))
        placements = sorted({", ".join(map(repr, value.placements)) for value in sharded})
        live.facts = {
            "mesh": {"shape": list(mesh.shape), "dims": list(mesh.mesh_dim_names or ())},
            "placements": placements,
        }


def _owner(model: nn.Module, key: str) -> nn.Module:
    """Return the module that extra state belongs to, within wrappers that leave no trace in names."""
    module = model.get_submodule(key.rpartition(".")[0])
    while type(module).set_extra_state is nn.Module.set_extra_state:
        inner = getattr(module, "_checkpoint_wrapped_module", None) or getattr(module, "_orig_mod", None)
        if inner is None:
            break
        module = inner
    return module


def _add(live: LiveModel, name: str, value: Tensor, ranks: Ranks) -> None:
    if isinstance(value, DTensor):
        pieces, copy, copies = dtensor_pieces(value, name)
        writes = takes_turn(name, copy, copies)
        tensor = LiveTensor(name=name, shape=tuple(value.shape), dtype=value.dtype, pieces=pieces, writes=writes)
    else:
        tensor = plain(name, value, ranks, spreads=isinstance(value, nn.Parameter))
    live.tensors[name] = tensor
    if isinstance(value, nn.Parameter):
        live.slots[id(value)] = _slot(value, tensor)


def _slot(param: nn.Parameter, tensor: LiveTensor) -> ParamSlot:
    local: Any = param.detach()
    local_shape = tuple(local.to_local().shape) if isinstance(param, DTensor) else tuple(param.shape)

    def cut(moment: Tensor) -> list[Piece] | None:
        if isinstance(moment, DTensor):
            return dtensor_pieces(moment, tensor.name)[0] if tuple(moment.shape) == tensor.shape else None
        if tuple(moment.shape) != local_shape:
            return None
        if isinstance(param, DTensor):  # a plain tensor beside a sharded parameter: laid out like its shard
            rows = zip(tensor.pieces, _like(param, moment), strict=True)
            return [replace(piece, tensor=view) for piece, view in rows]
        return [whole(moment)]

    first = any(not any(piece.offsets) for piece in tensor.pieces)
    span = Span(name=tensor.name, shape=tensor.shape, cut=cut, is_owner=tensor.writes and first)
    return ParamSlot(param=param, spans=[span], names=[tensor.name], writes=tensor.writes)


def _like(param: DTensor, moment: Tensor) -> list[Tensor]:
    shaped = DTensor.from_local(
        moment.detach(), param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return [piece.tensor for piece in dtensor_pieces(shaped, "")[0]]


def refuse_meta(live: LiveModel, hint: str) -> None:
    """Make sure that a model has values.

    Raises:
        UsageError: It, or some of it, is on the meta device.
    """
    on_meta = [name for name, tensor in live.tensors.items() if any(piece.tensor.is_meta for piece in tensor.pieces)]
    if on_meta:
        raise UsageError(
            f"the model is still on the meta device ({on_meta[0]} and {len(on_meta) - 1} others): it has no values",
            hint=hint,
        )


def settle(live: LiveModel, ranks: Ranks, doing: str) -> None:
    """Find out whether all ranks have the same model, and what others have where they do not (pipelines). A collective.

    Tensors that are held whole are then stored by ranks that have them.
    """
    names = sorted((*live.tensors, *live.extra))
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    if len(set(ranks.gather_all(digest, doing))) == 1:
        return
    live.differs = True
    everywhere = [name for name, tensor in live.tensors.items() if tensor.everywhere]
    owners: dict[str, list[int]] = {}
    for rank, (theirs, whole_ones) in enumerate(ranks.gather_all((names, everywhere), doing)):
        live.elsewhere |= set(theirs) - set(names)
        for name in whole_ones:
            owners.setdefault(name, []).append(rank)
    turns = {}
    for name in everywhere:
        place = owners[name].index(ranks.rank)
        turns[name] = takes_turn(name, place, len(owners[name])) if live.tensors[name].spreads else place == 0
    for name, writes in turns.items():
        live.tensors[name] = replace(live.tensors[name], writes=writes)
    for key, slot in live.slots.items():
        if slot.names[0] in turns:
            writes = turns[slot.names[0]]
            spans = [replace(span, is_owner=writes) for span in slot.spans]
            live.slots[key] = replace(slot, spans=spans, writes=writes)
