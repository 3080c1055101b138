"""One ``.metadata`` from those that each rank wrote for itself (``use_collectives=False``, torch 2.9 and newer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.plan.boxes import check_coverage

__all__ = ["unite"]


def unite(ranks: Mapping[str, DcpMetadata | None]) -> tuple[DcpMetadata, list[str]]:
    """Return the metadata of all ranks together, and notes on what several of them have.

    Of a box or object that several ranks have stored, the first rank's is taken, as torch does where ranks agree on
    who stores what.

    Args:
        ranks: By file name.

    Raises:
        Incompatible: One could not be read, they contradict each other, or tensors have holes.
    """
    tensors: dict[str, DcpTensor] = {}
    objects: list[str] = []
    paths: dict[str, tuple[str | int, ...]] = {}
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    shared: set[str] = set()
    boxes: dict[str, set[tuple[Shape, Shape]]] = {}
    seen: set[str] = set()
    for name, metadata in sorted(ranks.items(), key=lambda item: (len(item[0]), item[0])):
        if metadata is None:
            raise Incompatible(f"{name} cannot be read")
        for key, tensor in metadata.tensors.items():
            known = tensors.setdefault(key, replace(tensor, chunks=[]))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise Incompatible(f"`{key}` has another dtype or shape in {name}")
            have = boxes.setdefault(key, set())
            known.chunks.extend(box for box in tensor.chunks if box not in have)
            have.update(tensor.chunks)
        shared.update(key for key in metadata.objects if key in seen)
        objects += [key for key in metadata.objects if key not in seen]
        seen.update(metadata.objects)
        for key, path in metadata.paths.items():
            paths.setdefault(key, path)
        for place, info in metadata.storage.items():
            storage.setdefault(place, info)
    for key, tensor in tensors.items():
        if not check_coverage(tensor.shape, tensor.chunks).is_exact:
            raise Incompatible(f"`{key}` has holes: files of some ranks are missing")
    if set(objects) & tensors.keys():
        raise Incompatible("a key is a tensor on one rank, and none on another")
    notes = []
    if shared:
        some = min(shared)
        notes.append(
            f"{len(shared)} values are stored by several ranks, first `{some}`: those of the first rank are used"
        )
    found = DcpMetadata(tensors=tensors, objects=objects, paths=paths, storage=storage, writer="torch 2.9-2.14")
    return found, notes
