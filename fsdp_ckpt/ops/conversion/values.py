"""Read what a checkpoint holds besides tensors, whole and uncut, as plain values; and small tensors, as bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fsdp_ckpt.catalog import Encoding, ObjectEntry, Part, Role, TensorEntry
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import FsdpCkptError, Incompatible, MalformedFile
from fsdp_ckpt.layouts.torch_file import open_torch_value
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import format_size

if TYPE_CHECKING:
    from fsdp_ckpt.run.sources import Sources

__all__ = ["expand", "load_value", "read_small_tensor", "unreadable"]

_MAX_EXPANDED = 64 << 20
_SMALL_BYTES = 1 << 16


def load_value(entry: ObjectEntry, store: LocalStore) -> Any:
    """Return the value of an object as ``codec.pickles`` decodes it.

    Instances of classes that are not on the list of harmless ones are ``Opaque`` records, which can be looked at but
    not written again; tensors are ``TensorRef`` and the like.

    Raises:
        CorruptCheckpoint: It cannot be read.
        UnknownLayout: It is a file that torch did not write.
        Incompatible: It needs a package that is not installed.
    """
    if entry.decoded:
        return entry.value
    where = f"{entry.file} (`{entry.key}`)"
    reader = store.reader(entry.file)
    if entry.encoding is Encoding.ZSTD_TORCH_ZIP:
        data = expand(reader(entry.start, entry.stop - entry.start), where)
        archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where=where)
        return archive.load(TORCH, allow_unknown=True)
    if entry.start or entry.stop != store.size(entry.file):
        return open_archive(reader, entry.start, entry.stop, where=where).load(TORCH, allow_unknown=True)
    return open_torch_value(store, entry.file)


def unreadable(parts: Iterable[Part], store: LocalStore) -> list[str]:
    """Return a warning for each small file that is copied as it is although nothing could be read in it.

    Args:
        parts: Schedulers, random states and the like; others are not looked at.
        store: Their files.
    """
    found = []
    for part in parts:
        if part.tensors or part.dialect != "torch-file" or part.role in (Role.MODEL, Role.OPTIMIZER):
            continue
        for entry in part.objects.values():
            try:
                load_value(entry, store)
            except FsdpCkptError as error:
                found.append(f"{entry.file} is copied as it is, but cannot be read: {error.message}")
    return found


def read_small_tensor(entry: TensorEntry, sources: Sources) -> bytes:
    """Return the elements of a tensor that lies in one piece, such as a learning rate that is a tensor.

    Raises:
        Incompatible: It is no small tensor.
        CorruptCheckpoint: It cannot be read.
    """
    if entry.num_bytes > _SMALL_BYTES or len(entry.chunks) != 1:
        raise Incompatible(f"`{entry.key}` is a tensor of shape {entry.shape}, where a single number is expected")
    store, chunk = sources.resolve(entry, entry.chunks[0])
    if chunk.strides is not None or chunk.stop - chunk.start < entry.num_bytes:
        raise MalformedFile(f"{chunk.file}: `{entry.key}` is not stored in one piece")
    return store.reader(chunk.file)(chunk.start, entry.num_bytes)


def expand(data: bytes, where: str) -> bytes:
    """Return what a zstd stream holds, up to what an object may have.

    Args:
        data: The stream.
        where: File and object, for messages.

    Raises:
        MalformedFile: It is broken.
        Incompatible: zstandard is not installed, or it is more than that.
    """
    try:
        import zstandard
    except ImportError:
        raise Incompatible(f"{where} is compressed with zstd", hint="pip install 'fsdp-ckpt[zstd]'") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
            found = bytes(stream.read(_MAX_EXPANDED + 1))
    except zstandard.ZstdError as error:
        raise MalformedFile(f"{where}: broken zstd stream: {error}") from None
    if len(found) > _MAX_EXPANDED:
        raise Incompatible(
            f"{where} is compressed with zstd, and more than {format_size(_MAX_EXPANDED)} when expanded: a value of "
            "this size is not read",
            hint="load it with torch, and save it without compression",
        )
    return found
