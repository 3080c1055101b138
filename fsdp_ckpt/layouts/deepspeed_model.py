"""Put a DeepSpeed model together: flat weights, buffers, frozen parameters, further names of shared ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_ckpt.catalog import Chunk, ObjectEntry, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.codec.tensors import TensorRef
from fsdp_ckpt.errors import MalformedFile, NameCollision
from fsdp_ckpt.layouts.deepspeed_flat import Member, Segment, cut_members
from fsdp_ckpt.layouts.deepspeed_state import ModuleState, Stored
from fsdp_ckpt.layouts.flatten import flatten
from fsdp_ckpt.plan.boxes import flat_boxes

__all__ = ["Pieces", "model_tensors", "nested_part", "side_parts"]


class Pieces:
    """Makes tensors of segments of flat ones, each of which is located once."""

    def __init__(self) -> None:
        self._located: dict[int, tuple[Stored, Chunk]] = {}

    def entry(
        self, key: str, shape: Shape, segments: Iterable[Segment], flat: Callable[[Segment], Stored]
    ) -> TensorEntry | None:
        """Return the tensor that segments form; None when there are none, so that nobody can say its dtype.

        Args:
            key: Its key.
            shape: Its shape.
            segments: In any order; not all of it need be there.
            flat: Returns the flat tensor that a segment is a run of.

        Raises:
            MalformedFile: A flat tensor is too short, or of another dtype than the others.
        """
        chunks: list[Chunk] = []
        dtype = None
        for segment in segments:
            stored = flat(segment)
            tensor = stored.tensor
            if len(tensor.shape) != 1 or segment.start + segment.numel > tensor.shape[0]:
                raise MalformedFile(f"{stored.file}: `{key}` reaches beyond the flat tensor that it is in")
            if dtype is not None and dtype != tensor.dtype:
                raise MalformedFile(f"{stored.file}: `{key}` is {tensor.dtype} here, {dtype} on another rank")
            dtype = tensor.dtype
            whole = self._locate(stored)
            begin = whole.start + segment.start * dtype.itemsize
            for offsets, lengths in flat_boxes(shape, segment.first, segment.first + segment.numel):
                stop = begin + math.prod(lengths) * dtype.itemsize
                chunks.append(
                    whole._replace(
                        offsets=offsets,
                        lengths=lengths,
                        start=begin,
                        stop=stop,
                        crc_range=whole.crc_range or (whole.start, whole.stop),
                    )
                )
                begin = stop
        return None if dtype is None else TensorEntry(key=key, name=key, dtype=dtype, shape=shape, chunks=tuple(chunks))

    def _locate(self, stored: Stored) -> Chunk:
        known = self._located.get(id(stored))
        if known is None:
            known = self._located[id(stored)] = stored, stored.chunk()
        return known[1]


def model_tensors(
    weights: Mapping[str, TensorEntry], modules: Mapping[int, ModuleState], world_size: int, *, is_cut: bool
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """Return all tensors of the model, in the module's order, and what is not there.

    Args:
        weights: The trained parameters.
        modules: The model files by rank; up to ZeRO-2 only one, which has everything.
        world_size: Ranks that frozen parameters are cut for.
        is_cut: Whether parameters are cut (ZeRO-3), so that the module has none of their elements.
    """
    first = next(iter(modules.values()))
    frozen = _frozen(modules, world_size) if is_cut else {key: _whole(key, item) for key, item in first.frozen.items()}
    found: dict[str, TensorEntry] = {}
    problems = []
    for key in [*first.module, *weights, *frozen, *first.shared]:
        if key in found:
            continue
        source = first.shared.get(key, key)
        stored = first.module.get(key)
        if source in weights:
            found[key] = replace(weights[source], key=key, name=key)
        elif stored is not None and (not is_cut or key in first.buffers):
            found[key] = _whole(key, stored)
        elif source in frozen:
            found[key] = replace(frozen[source], key=key, name=key)
        elif stored is not None and stored.tensor.shape != (0,):  # a tensor that ZeRO does not manage
            found[key] = _whole(key, stored)
        else:
            message = "only its name was saved: frozen parameters were left out, or its rank's file is missing"
            problems.append(Problem(severity=Severity.WARNING, code="missing-tensor", where=key, message=message))
    return found, problems


def _whole(key: str, stored: Stored) -> TensorEntry:
    tensor = stored.tensor
    return TensorEntry(key=key, name=key, dtype=tensor.dtype, shape=tensor.shape, chunks=(stored.chunk(),))


def _frozen(modules: Mapping[int, ModuleState], world_size: int) -> dict[str, TensorEntry]:
    """Return the frozen parameters of ZeRO-3, of which every rank has a part."""
    pieces, found = Pieces(), {}
    for key, shape in next(iter(modules.values())).frozen_shapes.items():
        parts = {rank: state.frozen[key] for rank, state in modules.items() if key in state.frozen}
        sizes = {rank: (math.prod(part.tensor.shape),) for rank, part in parts.items()}
        segments = cut_members([Member(name=key, numel=math.prod(shape))], sizes, world_size)[key]
        entry = pieces.entry(key, shape, segments, lambda segment, parts=parts: parts[segment.rank])  # type: ignore[misc]
        if entry is not None:
            found[key] = entry
        elif parts and 0 in shape:
            dtype = next(iter(parts.values())).tensor.dtype
            found[key] = TensorEntry(key=key, name=key, dtype=dtype, shape=shape, chunks=())
    return found


def side_parts(module: ModuleState) -> list[Part]:
    """Return what was saved besides model and optimizer: the scheduler, counters and the caller's own."""
    parts = [nested_part("lr_scheduler", Role.SCHEDULER, module.scheduler, module)] if module.scheduler else []
    return [*parts, nested_part("extra_state", Role.OTHER, module.others, module)] if module.others else parts


def nested_part(name: str, role: Role, value: Any, module: ModuleState) -> Part:
    """Return a part for a nested value of a model file.

    Raises:
        NameCollision: Two values in it would get one key.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for path, item in flatten(value, where=module.file):
        key = ".".join(map(str, path)) or name
        if key in tensors or key in objects:
            raise NameCollision(f"{module.file}: two values of {name} would both be named `{key}`")
        place = path or (name,)
        if isinstance(item, TensorRef):
            tensors[key] = replace(_whole(key, Stored(module.archive, module.file, item)), path=place)
        else:
            objects[key] = ObjectEntry(
                key=key, name=key, file=module.file, start=0, stop=module.size, value=item, decoded=True, path=place
            )
    return Part(
        name=name,
        role=role,
        dialect="deepspeed",
        folder=module.file.rpartition("/")[0],
        files={module.file: module.size},
        tensors=tensors,
        objects=objects,
    )
