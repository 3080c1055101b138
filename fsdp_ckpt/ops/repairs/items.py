"""Do the items of ``.distcp`` files agree with what a ``.metadata`` says of them? Each says itself what it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Chunk, Encoding, Shape, TensorEntry
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.safetensors import HeaderTensor, read_header
from fsdp_ckpt.codec.stamp import is_free
from fsdp_ckpt.codec.tensors import TORCH, TensorRef
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import FsdpCkptError, Incompatible, MalformedFile
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.run.checksum import verify_record
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import Folder

__all__ = ["Fit", "check_items", "check_object", "walk_archives"]

_ZSTD = "stream.zstd/1"
_MAX_GAP_BYTES = 4096
"""What is left free between items: our own data begin on blocks."""
_EOCD_BYTES = 22
_END_BYTES = 56 + 20 + _EOCD_BYTES
"""The three records at the end of every archive that torch or we write: 64-bit end, its locator, end."""


@dataclass(slots=True)
class Fit:
    """How well items agree with metadata.

    Attributes:
        why: The first contradiction; None when there is none.
        strided: Tensors of which an item has strides of its own: it is not row-major.
        num_items: Items that were looked at.
    """

    why: str | None = None
    strided: set[str] = field(default_factory=set)
    num_items: int = 0


def check_items(folder: Folder, metadata: DcpMetadata, *, data: bool) -> Fit:
    """Compare every item with the metadata: its place, what it is, dtype and shape, the checksum of its description.

    Args:
        folder: Where the data files are.
        metadata: What to compare with; paths are relative to the folder.
        data: Also compare the checksums of the tensors' bytes, which reads all of them.
    """
    fit = Fit()
    try:
        with Sources(folder.store.roots) as sources:
            _Check(folder, metadata, sources, fit, data=data).run()
    except FsdpCkptError as error:
        fit.why = error.message
    except OSError as error:  # a bad sector, say
        fit.why = f"cannot be read: {error.strerror}"
    return fit


@dataclass(slots=True)
class _Check:
    folder: Folder
    metadata: DcpMetadata
    sources: Sources
    fit: Fit
    data: bool
    blobs: dict[tuple[str, int], Mapping[str, HeaderTensor]] = field(default_factory=dict)

    def run(self) -> None:
        self._extents()
        for key, tensor in self.metadata.tensors.items():
            coverage = check_coverage(tensor.shape, tensor.chunks)
            if not coverage.is_exact:
                raise MalformedFile(f"`{key}` is not tiled by its chunks")
            for offsets, lengths in tensor.chunks:
                self._tensor(key, tensor, offsets, lengths)
        for key in self.metadata.objects:
            info = self.metadata.storage.get((key, None))
            if info is None:
                raise MalformedFile(f"`{key}` has no place")
            self.fit.num_items += 1
            if not info[3]:
                check_object(self.folder, key, info)

    def _extents(self) -> None:
        """Make sure that items lie in files, and not in one another."""
        by_file: dict[str, list[tuple[int, int]]] = {}
        for file, start, length, _ in set(self.metadata.storage.values()):
            by_file.setdefault(file, []).append((start, start + length))
        for file, extents in by_file.items():
            path = self.folder.prefix + file
            size = self.folder.store.size(path)
            if size is None:
                raise MalformedFile(f"{path} is missing")
            end = 0
            for start, stop in sorted(extents):
                if start < end and not self._is_blob(file, start):
                    raise MalformedFile(f"{path}: items overlap at byte {start}")
                end = max(end, stop)
            if end > size:
                raise MalformedFile(f"{path}: has {size} bytes, but would hold items up to byte {end}")

    def _is_blob(self, file: str, start: int) -> bool:
        reader = self.folder.store.reader(self.folder.prefix + file)
        return reader(start + 8, 1) == b"{"

    def _tensor(self, key: str, tensor: DcpTensor, offsets: Shape, lengths: Shape) -> None:
        info = self.metadata.storage.get((key, offsets))
        if info is None:
            if 0 in lengths:
                return
            raise MalformedFile(f"`{key}` has no place")
        self.fit.num_items += 1
        file, start, length, transforms = info
        if 0 in lengths and not length:
            return
        if not transforms and length and length == math.prod(lengths) * tensor.dtype.itemsize:
            if self.metadata.writer != "ByteCheckpoint":
                self._blob(key, tensor, lengths, file, start)
            return
        encoding = Encoding.TORCH_ZIP
        if transforms:
            encoding = Encoding.ZSTD_TORCH_ZIP
            if transforms != (_ZSTD,):
                raise Incompatible(f"`{key}` is stored through {', '.join(transforms)}, which is not supported")
        chunk = Chunk(offsets, lengths, self.folder.prefix + file, start, start + length, encoding)
        entry = TensorEntry(key=key, name=key, dtype=tensor.dtype, shape=tensor.shape, chunks=(chunk,))
        store, raw = self.sources.resolve(entry, chunk)
        if raw.strides is not None:
            self.fit.strided.add(key)
        if self.data:
            verify_record(store, raw, key=key)

    def _blob(self, key: str, tensor: DcpTensor, lengths: Shape, file: str, start: int) -> None:
        path = self.folder.prefix + file
        items = self.blobs.get((file, start))
        if items is None:
            reader, size = self.folder.store.reader(path), self.folder.store.size(path) or 0
            header = read_header(reader, start, size, where=path)
            items = self.blobs[file, start] = {item.name: item for item in header.tensors}
        found = items.get(key)
        if found is None or found.dtype != tensor.dtype or found.shape != lengths:
            raise MalformedFile(f"{path}: `{key}` is not what the metadata say")


def check_object(folder: Folder, key: str, info: StorageInfo) -> object:
    """Open an object's archive, compare the checksum of its description, and return the value.

    Raises:
        MalformedFile: There is no archive, or it holds a bare tensor.
        ChecksumMismatch: It is damaged.
    """
    file, start, length, _ = info
    path = folder.prefix + file
    archive = open_archive(folder.store.reader(path), start, start + length, where=f"{path} (`{key}`)")
    for name in archive.records:
        if not name.startswith("data/"):
            archive.read(name)
    value: object = archive.load(TORCH, allow_unknown=True)
    if isinstance(value, TensorRef):
        raise MalformedFile(f"{path}: `{key}` is a tensor, the metadata say that it is none")
    return value


def walk_archives(folder: Folder, file: str) -> list[tuple[int, int]]:
    """Return where the archives lie that a ``.distcp`` file consists of, in order.

    They are found from the end: each ends with a record that says how long it is, and what is before it is the end of
    the one before, or up to 4095 zeros after that; a file of ours may begin with a stamp. So no byte of a tensor is
    ever taken for the end of an archive.

    Raises:
        MalformedFile: The file does not consist of archives and nothing else.
    """
    path = folder.prefix + file
    read_at, size = folder.store.reader(path), folder.store.size(path)
    if not size:
        return []
    found: list[tuple[int, int]] = []
    stop = size
    while stop > 0:
        window_start = max(0, stop - _END_BYTES - _MAX_GAP_BYTES)
        window = read_at(window_start, stop - window_start)
        start, end = _last_archive(window, window_start, path)
        if window[end - window_start :].strip(b"\0") or (not found and end != size):
            raise MalformedFile(f"{path}: bytes before {stop} belong to no archive")
        open_archive(read_at, start, end, where=f"{path} (item at {start})")
        found.append((start, end))
        if start == 0 or (start < _MAX_GAP_BYTES and is_free(read_at(0, start), 0)):
            break
        stop = start
    return found[::-1]


def _last_archive(window: bytes, window_start: int, path: str) -> tuple[int, int]:
    """Return the extent of the archive that ends last in a window."""
    for place in _signatures(window):
        at64 = place - 20 - 56
        is_end = window[place + 20 : place + 22] == b"\0\0"
        if (
            at64 >= 0
            and is_end
            and window[at64 : at64 + 4] == b"PK\6\6"
            and window[place - 20 : place - 16] == b"PK\6\7"
        ):
            relative = int.from_bytes(window[place - 12 : place - 4], "little")
            start = window_start + at64 - relative
            if start >= 0:
                return start, window_start + place + _EOCD_BYTES
    raise MalformedFile(f"{path}: no archive ends at byte {window_start + len(window)}")


def _signatures(window: bytes) -> Iterator[int]:
    place = window.rfind(b"PK\5\6")
    while place >= 0:
        yield place
        place = window.rfind(b"PK\5\6", 0, place)
