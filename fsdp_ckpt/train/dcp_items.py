"""The items of a distributed checkpoint's folder, one by one, as its metadata list them: where each lies, and objects.

``layouts.dcp`` makes a catalog of a whole folder. Here is a job that asks for the items that its ranks need.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Chunk, DType, Encoding, Shape, TensorEntry
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, StorageInfo
from fsdp_ckpt.codec.safetensors import Header, read_header
from fsdp_ckpt.errors import Incompatible, IncompleteCheckpoint, MalformedFile
from fsdp_ckpt.plan.boxes import Box, check_coverage, intersect
from fsdp_ckpt.run.sources import Located, Sources
from fsdp_ckpt.train.dcp_objects import check_object

__all__ = ["Items"]

_ZSTD = ("stream.zstd/1",)
_MAX_OBJECT_BYTES = 1 << 30


class Items:
    """Finds items; safe to use from several threads.

    Args:
        folder: The folder.
        metadata: What its ``.metadata`` say.

    Attributes:
        metadata: As given.
    """

    def __init__(self, folder: Path, metadata: DcpMetadata) -> None:
        self.metadata = metadata
        self._sources = Sources(folder)
        self._entries: dict[str, tuple[TensorEntry, dict[Shape, Shape]]] = {}
        self._located: dict[tuple[str, Shape], Located] = {}
        self._objects: dict[str, bytes] = {}
        self._blobs: dict[tuple[str, int], Header] = {}

    def close(self) -> None:
        """Close all files, and remove what was expanded."""
        self._sources.__exit__(None, None, None)
        self._located.clear()

    def place(self, key: str, offsets: Shape | None) -> StorageInfo:
        """Return file, offset, length in bytes and transforms of an item.

        Args:
            key: Its key.
            offsets: Where a chunk begins in its tensor; None for an object.

        Raises:
            IncompleteCheckpoint: The metadata do not say.
        """
        found = self.metadata.storage.get((key, offsets))
        if found is None:
            raise IncompleteCheckpoint(f"the metadata do not say where `{key}` is stored")
        return found

    def is_compressed(self, key: str, offsets: Shape) -> bool:
        """Tell whether finding an item means expanding it into a temporary file."""
        return bool(self.place(key, offsets)[3])

    def entry(self, key: str) -> TensorEntry:
        """Return name, dtype and shape of a tensor; its chunks are found by ``locate``."""
        return self._entry(key)[0]

    def lengths(self, key: str, offsets: Shape) -> Shape:
        """Return the extent of a chunk.

        Raises:
            IncompleteCheckpoint: The metadata do not list it.
        """
        found = self._entry(key)[1].get(offsets)
        if found is None:
            raise IncompleteCheckpoint(f"the metadata list no shard of `{key}` at {offsets}")
        return found

    def locate(self, key: str, offsets: Shape) -> Located:
        """Return where the elements of a chunk lie, and check that its file is long enough.

        Raises:
            MalformedFile: The record is damaged, not what the metadata say, or outside of the folder.
            IncompleteCheckpoint: The metadata do not list it, or its file is not there.
            Incompatible: It is stored through something else than zstd, or zstandard is not installed.
        """
        known = self._located.get((key, offsets))
        if known is None:
            entry = self.entry(key)
            chunk = self._chunk(entry, (offsets, self.lengths(key, offsets)))
            known = self._located[key, offsets] = self._sources.resolve(entry, chunk)
            store, raw = known
            size = store.size(raw.file)
            if size is None:
                raise IncompleteCheckpoint(f"{raw.file} is missing")
            if size < raw.stop:
                raise MalformedFile(f"{raw.file} ends within `{key}`")
        return known

    def object_bytes(self, key: str) -> bytes:
        """Return the bytes of an object, once it is known that reading them runs no code; they are kept.

        Raises:
            UnsafePickle: It refers to a name that is not allowed; nothing was run.
            MalformedFile: It is damaged, or no ``torch.save`` archive.
        """
        known = self._objects.get(key)
        if known is None:
            file, start, length, transforms = self.place(key, None)
            where = f"{file} (`{key}`)"
            known = self._sources.store.reader(file)(start, length)
            if transforms:
                _check_transforms(transforms, where)
                known = _expand(known, where)
            check_object(known, where)
            self._objects[key] = known
        return known

    def check_covered(self, key: str, boxes: Sequence[Box]) -> None:
        """Make sure that all of some boxes of a tensor is stored, and no element of them twice.

        Raises:
            IncompleteCheckpoint: Something is in no shard; torch would leave it as it is, or uninitialised.
            MalformedFile: Shards overlap, or lie outside of the tensor.
        """
        entry, chunks = self._entry(key)
        for box in boxes:
            if len(box[0]) != len(entry.shape):
                raise Incompatible(f"`{key}` has {len(entry.shape)} dimensions in the checkpoint, {len(box[0])} here")
            shared = [
                part
                for chunk in chunks.items()
                if not _is_apart(chunk, box)
                and (key, chunk[0]) in self.metadata.storage
                and (part := intersect(chunk, box)) is not None
            ]
            moved = [(tuple(a - b for a, b in zip(part[0], box[0], strict=True)), part[1]) for part in shared]
            found = check_coverage(box[1], moved)
            if found.overlap is not None:
                raise MalformedFile(
                    f"`{key}`: shards at {' and '.join(str(shared[n][0]) for n in found.overlap)} overlap"
                )
            if found.missing is not None:
                raise IncompleteCheckpoint(
                    f"`{key}`: {found.missing_elements} of {math.prod(box[1])} elements that are to be loaded (at "
                    f"{box[0]}) are in no shard",
                    hint="the save was cut off, or made by each rank for itself (use_collectives=False, no_dist=True)",
                )

    def _entry(self, key: str) -> tuple[TensorEntry, dict[Shape, Shape]]:
        known = self._entries.get(key)
        if known is None:
            tensor = self.metadata.tensors.get(key)
            if tensor is None:
                raise IncompleteCheckpoint(f"the metadata list no tensor `{key}`")
            for offsets, lengths in tensor.chunks:
                if not len(offsets) == len(lengths) == len(tensor.shape) or any(
                    offset + length > size for offset, length, size in zip(offsets, lengths, tensor.shape, strict=True)
                ):
                    raise MalformedFile(f"`{key}`: a shard at {offsets} lies outside of the shape {tensor.shape}")
            entry = TensorEntry(key=key, name=key, dtype=tensor.dtype, shape=tensor.shape, chunks=())
            solid = sorted(tensor.chunks, key=lambda chunk: 0 not in chunk[1])  # goes before an empty one at its place
            known = self._entries[key] = (entry, dict(solid))
        return known

    def _chunk(self, entry: TensorEntry, box: Box) -> Chunk:
        """Return an item as the catalog has it, by the rules of ``layouts.dcp``."""
        file, start, length, transforms = self.place(entry.key, box[0])
        num_bytes = math.prod(box[1]) * entry.dtype.itemsize
        if transforms:
            _check_transforms(transforms, f"{file} (`{entry.key}`)")
            return Chunk(*box, file, start, start + length, Encoding.ZSTD_TORCH_ZIP)
        if length != num_bytes or not length:  # an archive is always longer than the tensor in it
            return Chunk(*box, file, start, start + length, Encoding.TORCH_ZIP)
        if self.metadata.writer == "ByteCheckpoint":
            return Chunk(*box, file, start, start + length, Encoding.RAW)
        return self._in_blob(entry.key, entry.dtype, box, file, start)

    def _in_blob(self, key: str, dtype: DType, box: Box, file: str, start: int) -> Chunk:
        """Find a tensor in the safetensors blob that begins at ``start``, see SerializationFormat.SAFETENSORS."""
        header = self._blobs.get((file, start))
        if header is None:
            store = self._sources.store
            size = store.size(file)
            if size is None:
                raise IncompleteCheckpoint(f"{file} is missing")
            header = self._blobs[file, start] = read_header(store.reader(file), start, size, where=file)
        for item in header.tensors:
            if item.name == key:
                if item.dtype != dtype or item.shape != box[1]:
                    raise MalformedFile(f"{file}: `{key}` is not what the metadata say")
                return Chunk(*box, file, item.start, item.stop)
        raise MalformedFile(f"{file}: `{key}` is missing")


def _is_apart(chunk: Box, box: Box) -> bool:
    """Tell quickly that two boxes lie apart along dimension 0; False may be wrong."""
    if not box[0]:
        return False
    return chunk[0][0] >= box[0][0] + box[1][0] or chunk[0][0] + chunk[1][0] <= box[0][0]


def _check_transforms(transforms: tuple[str, ...], where: str) -> None:
    if transforms != _ZSTD:
        raise Incompatible(f"{where} is stored through {', '.join(transforms)}, which is not supported")


def _expand(data: bytes, where: str) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise Incompatible(f"{where} is compressed with zstd", hint="pip install 'fsdp-ckpt[zstd]'") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
            found = bytes(stream.read(_MAX_OBJECT_BYTES + 1))
    except zstandard.ZstdError as error:
        raise MalformedFile(f"{where}: broken zstd stream: {error}") from None
    if len(found) > _MAX_OBJECT_BYTES:
        raise MalformedFile(f"{where}: expands to more than {_MAX_OBJECT_BYTES} bytes")
    return found
