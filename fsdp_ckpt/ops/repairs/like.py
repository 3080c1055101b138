"""Metadata for data files whose own are lost, from a checkpoint of the same model: names from there, places from here.

Nothing is guessed: files have to be called the same, every item has to say of itself what the metadata say of it, and
where places differ, as values that are no tensors have other lengths, files have to be archives without a rest, as
many as the other checkpoint lists and of the same kinds in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdp_ckpt.catalog import Chunk, Encoding, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, StorageInfo
from fsdp_ckpt.codec.torchzip import resolve_item
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.ops.repairs.items import check_items, check_object, walk_archives
from fsdp_ckpt.store.local import Folder

__all__ = ["metadata_like"]

_Item = tuple[tuple[str, Shape | None], StorageInfo]


def metadata_like(folder: Folder, other: Folder, theirs: DcpMetadata) -> DcpMetadata:
    """Return metadata for the data files of a folder.

    Args:
        folder: Data files without metadata.
        other: The same part of a checkpoint of the same model.
        theirs: Its metadata.

    Raises:
        Incompatible: They do not fit, or it cannot be told whether they do.
    """
    listed = {info[0] for info in theirs.storage.values()}
    here = {file for file, size in folder.files.items() if file.endswith(".distcp") and size}
    if listed - here:
        raise Incompatible(f"{_some(listed - here)} {'is' if len(listed - here) == 1 else 'are'} missing here")
    if here - listed:
        raise Incompatible(f"{_some(here - listed)} {'is' if len(here - listed) == 1 else 'are'} not among its files")
    sizes = {file: other.files.get(file) for file in listed}
    if all(sizes[file] == folder.files[file] for file in listed):
        fit = check_items(folder, theirs, data=False)
        if fit.why is None:
            _check_kinds(folder, other, theirs)
            return theirs
        if not theirs.objects:
            raise Incompatible(fit.why)
    elif not theirs.objects:
        file = next(file for file in sorted(listed) if sizes[file] != folder.files[file])
        raise Incompatible(f"{folder.prefix}{file} has {folder.files[file]} bytes here, {sizes[file]} there")
    return _match(folder, other, theirs)


def _match(folder: Folder, other: Folder, theirs: DcpMetadata) -> DcpMetadata:
    """Take the items of each file in order."""
    if any(info[3] for info in theirs.storage.values()):
        raise Incompatible("items are compressed: their lengths tell nothing")
    by_file: dict[str, list[_Item]] = {}
    for key, info in theirs.storage.items():
        by_file.setdefault(info[0], []).append((key, info))
    places: dict[tuple[str, Shape | None], StorageInfo] = {}
    boxes = {name: dict(tensor.chunks) for name, tensor in theirs.tensors.items()}
    try:
        for file, items in by_file.items():
            items.sort(key=lambda item: item[1][1])
            extents = walk_archives(folder, file)
            if len(extents) != len(items):
                raise Incompatible(f"{folder.prefix}{file} holds {len(extents)} items here, {len(items)} there")
            for (key, info), (start, stop) in zip(items, extents, strict=True):
                place = file, start, stop - start, ()
                _check_item((folder, place), (other, info), theirs, key, boxes)
                places[key] = place
        found = replace(theirs, storage={key: places[key] for key in theirs.storage})
        fit = check_items(folder, found, data=False)
    except CorruptCheckpoint as error:
        raise Incompatible(error.message) from None
    if fit.why is not None:
        raise Incompatible(fit.why)
    return found


def _check_item(
    mine: tuple[Folder, StorageInfo],
    other: tuple[Folder, StorageInfo],
    theirs: DcpMetadata,
    key: tuple[str, Shape | None],
    boxes: Mapping[str, Mapping[Shape, Shape]],
) -> None:
    """Make sure that an item is what the other checkpoint has at this place in the order.

    Raises:
        CorruptCheckpoint: It is something else, or broken.
        Incompatible: It is a value of another kind.
    """
    name, offsets = key
    folder, place = mine
    path = folder.prefix + place[0]
    if offsets is None:
        value, their_value = check_object(folder, name, place), check_object(other[0], name, other[1])
        if _kind(value) != _kind(their_value):
            raise Incompatible(f"{path}: what stands at the place of `{name}` is a value of another kind")
        return
    tensor = theirs.tensors[name]
    chunk = Chunk(offsets, boxes[name][offsets], path, place[1], place[1] + place[2], Encoding.TORCH_ZIP)
    resolve_item(chunk, tensor.dtype, folder.store.reader(path), where=f"{path} (`{name}`)")


def _check_kinds(folder: Folder, other: Folder, theirs: DcpMetadata) -> None:
    """Compare the values that are no tensors, where all places are the same.

    Raises:
        CorruptCheckpoint: One is broken.
        Incompatible: One is of another kind.
    """
    for key in theirs.objects:
        place = theirs.storage[key, None]
        if not place[3]:
            _check_item((folder, place), (other, place), theirs, (key, None), {})


def _kind(value: object) -> object:
    """Return what two steps of one run have in common: the type of a value, and the keys of a dictionary."""
    if isinstance(value, dict):
        return {str(key): type(item).__name__ for key, item in value.items()}
    return getattr(value, "cls", type(value).__name__)


def _some(files: set[str]) -> str:
    first, *more = sorted(files)
    return first + (f" and {len(more)} more" if more else "")
