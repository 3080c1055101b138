"""Read ``torch.save`` archives: a zip of uncompressed records, ``data.pkl`` describing tensors, ``data/N`` their bytes.

One such archive is a whole ``.pt`` file, or one item of a ``.distcp`` file. Only the directory at the end and the
small records are read here; where a tensor's bytes lie is the result.

Sizes and checksums come from the central directory, as torch leaves them out of the local headers. All records are
stored; a compressed one is refused, so nothing can expand. Format: PKWARE APPNOTE 6.3, ``caffe2/serialize`` in torch.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Chunk, DType, Encoding, Shape, contiguous_strides
from fsdp_ckpt.codec import ReadAt
from fsdp_ckpt.codec.distcp_item import recognise_item
from fsdp_ckpt.codec.pickles import Global, Machine
from fsdp_ckpt.codec.tensors import TORCH, TensorRef, storage_from_pid
from fsdp_ckpt.errors import ChecksumMismatch, Incompatible, ItemMismatch, MalformedFile

__all__ = ["Archive", "ZipRecord", "locate", "open_archive", "resolve_item"]

_EOCD = struct.Struct("<4s4H2LH")
_EOCD64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_REFUSED_FLAGS = 0x2061
"""Encrypted, patched, or with a hidden directory; torch refuses these as well."""
_IS_FOLDER = 0x10
"""Among the external attributes; torch reads nothing from such a record, and takes what was in memory."""
_WHOLE_BYTES = 8 << 10
_TAIL_BYTES = 2 << 10
_COMMENT_BYTES = 65535
_MAX_DIRECTORY_BYTES = 64 << 20
_MAX_PICKLE_BYTES = 256 << 20
_MAX_EXPANDED_BYTES = 1 << 30
_MAX_VERSION = 10
"""``kMaxSupportedFileFormatVersion`` of torch; what it writes is 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipRecord:
    """A stored record of an archive.

    Attributes:
        name: Without the archive's prefix (``data.pkl``).
        start: First byte of its content in the file, inclusive.
        size: Bytes of its content.
        crc32: As recorded in the central directory; 0 where the writer did not compute it.
    """

    name: str
    start: int
    size: int
    crc32: int


@dataclass(slots=True)
class Archive:
    """The records of one archive at ``[start, stop)`` of a file.

    Attributes:
        where: File and item, for messages.
        records: By name, without prefix.
        has_crc: Whether the writer computed checksums (torch can be told not to: then all are zero).
    """

    where: str
    read_at: ReadAt
    start: int
    stop: int
    records: Mapping[str, ZipRecord] = field(default_factory=dict)
    has_crc: bool = True

    def read(self, name: str) -> bytes:
        """Return a small record's content.

        Raises:
            MalformedFile: There is no such record, or it is too large to be one.
            ChecksumMismatch: Its bytes are damaged.
        """
        record = self.records.get(name)
        if record is None:
            raise MalformedFile(f"{self.where}: no record `{name}` in the archive")
        if record.size > _MAX_PICKLE_BYTES:
            raise MalformedFile(f"{self.where}: record `{name}` has an absurd size of {record.size} bytes")
        content = self.read_at(record.start, record.size)
        if self.has_crc and zlib.crc32(content) != record.crc32:
            raise ChecksumMismatch(f"{self.where}: record `{name}` is damaged: its CRC-32 is not the recorded one")
        return content

    def load(self, known: Mapping[str, Global] = TORCH, *, allow_unknown: bool = False) -> Any:
        """Return the value of ``data.pkl``; tensors are ``TensorRef``.

        Raises:
            UnsafePickle: It refers to a global that is not in ``known``.
            MalformedFile: It is broken.
        """
        data = self.read("data.pkl")
        self.check_version()
        return Machine(data, known, where=self.where, persistent=storage_from_pid, allow_unknown=allow_unknown).run()

    def check_version(self) -> None:
        """Refuse what torch refuses: an archive without a version, or of one that it does not know.

        Raises:
            MalformedFile: Its version or byte order is none.
            Incompatible: It was written on a big-endian machine.
        """
        order = self.read("byteorder").strip() if "byteorder" in self.records else b"little"
        if order == b"big":
            raise Incompatible(f"{self.where}: written on a big-endian machine, which is not supported")
        version = self.read(".data/version" if ".data/version" in self.records else "version").strip()
        if order != b"little" or not version.isdigit() or not 1 <= int(version[:9]) <= _MAX_VERSION:
            raise MalformedFile(f"{self.where}: an unknown version or byte order: {version!r:.20}, {order!r:.20}")

    def data_record(self, key: str) -> ZipRecord:
        """Return the record of a storage."""
        record = self.records.get(f"data/{key}")
        if record is None:
            raise MalformedFile(f"{self.where}: the storage `data/{key}` is missing")
        return record


def open_archive(read_at: ReadAt, start: int, stop: int, *, where: str) -> Archive:
    """Read the directory of the archive at ``[start, stop)``.

    Raises:
        MalformedFile: No archive, a truncated one, or one whose records contradict each other.
    """
    size = stop - start
    if size < _EOCD.size:
        raise MalformedFile(f"{where}: {size} bytes are too few for a torch archive")
    if size <= _WHOLE_BYTES:
        return _parse(_Window(read_at, start, stop, start, read_at(start, size)), where)
    tail_start = max(start, stop - _TAIL_BYTES)
    return _parse(_Window(read_at, start, stop, tail_start, read_at(tail_start, stop - tail_start)), where)


@dataclass(slots=True)
class _Window:
    """Bytes of an archive, the end of which has been read already."""

    read_at: ReadAt
    start: int
    stop: int
    have_from: int
    have: bytes

    def get(self, start: int, num_bytes: int) -> bytes:
        if start < self.start or num_bytes < 0 or start + num_bytes > self.stop:
            raise ValueError(f"{num_bytes} bytes at {start - self.start} of {self.stop - self.start}")
        if start >= self.have_from:
            return self.have[start - self.have_from : start - self.have_from + num_bytes]
        return self.read_at(start, num_bytes)

    def cached(self, start: int, num_bytes: int) -> bytes:
        """Answer from memory what was read already, for ``Archive.read_at``."""
        if start >= self.have_from and start + num_bytes <= self.stop:
            return self.get(start, num_bytes)
        return self.read_at(start, num_bytes)


def _parse(window: _Window, where: str) -> Archive:
    try:
        count, directory_start, directory_bytes = _find_directory(window)
        if directory_bytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {directory_bytes} bytes")
        directory = window.get(directory_start, directory_bytes)
        records: dict[str, ZipRecord] = {}
        prefix, has_crc, position = None, False, 0
        spans: list[tuple[int, int]] = []
        for _ in range(count):
            name, crc, num_bytes, header, position = _central_entry(directory, position)
            head, _, rest = name.partition("/")
            prefix = head if prefix is None else prefix
            if head != prefix or not rest or rest in records:
                raise ValueError(f"unexpected record name {name!r:.80}")
            content = _content_start(window, window.start + header, name)
            if content + num_bytes > directory_start:
                raise ValueError(f"record {name!r:.80} runs into the directory")
            spans.append((window.start + header, content + num_bytes))
            records[rest] = ZipRecord(name=rest, start=content, size=num_bytes, crc32=crc)
            has_crc = has_crc or (crc != 0 and num_bytes > 0)
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        if isinstance(error, MalformedFile):
            raise
        raise MalformedFile(f"{where}: not a torch archive, or a damaged one: {error}") from None
    spans.sort()
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans)):
        raise MalformedFile(f"{where}: two records overlap")
    if "version" not in records and ".data/version" not in records:
        raise MalformedFile(f"{where}: not a torch archive, or a damaged one: it has no version")
    return Archive(where, window.cached, window.start, window.stop, records, has_crc)


def _find_directory(window: _Window) -> tuple[int, int, int]:
    position = window.stop - _EOCD.size
    tail = window.get(position, _EOCD.size)
    if tail[:4] != b"PK\5\6":  # somebody added a comment
        begin = max(window.start, window.stop - _EOCD.size - _COMMENT_BYTES)
        block = window.get(begin, window.stop - begin)
        found = block.rfind(b"PK\5\6")
        if found < 0:
            raise ValueError("the end of the archive is missing")
        position = begin + found
        tail = block[found : found + _EOCD.size]
    _, disk, first_disk, on_disk, count, num_bytes, offset, _ = _EOCD.unpack(tail)
    disks = disk | first_disk | (on_disk ^ count)
    locator_at = position - _LOCATOR.size
    if locator_at >= window.start:
        locator = window.get(locator_at, _LOCATOR.size)
        if locator[:4] == b"PK\6\7":
            _, disk, at, num_disks = _LOCATOR.unpack(locator)
            disks |= disk | (num_disks ^ 1)
            end64 = _EOCD64.unpack(window.get(window.start + at, _EOCD64.size))
            if end64[0] != b"PK\6\6":
                raise ValueError("the 64-bit end record is missing")
            disks |= end64[4] | end64[5] | (end64[6] ^ end64[7])
            count, num_bytes, offset = end64[7], end64[8], end64[9]
            position = window.start + at
    if disks:  # torch refuses such archives as well
        raise ValueError("the end record is of an archive in several pieces")
    if offset + num_bytes > position - window.start or count * _CENTRAL.size > num_bytes:
        raise ValueError("the directory lies outside of the archive")
    return count, window.start + offset, num_bytes


def _central_entry(directory: bytes, position: int) -> tuple[str, int, int, int, int]:
    fields = _CENTRAL.unpack_from(directory, position)
    signature, flags, method, crc, packed, size = fields[0], fields[5], fields[6], fields[9], fields[10], fields[11]
    name_bytes, extra_bytes, comment_bytes, header = fields[12], fields[13], fields[14], fields[18]
    if position + _CENTRAL.size + name_bytes + extra_bytes + comment_bytes > len(directory):
        raise ValueError("a directory entry reaches beyond the directory")
    if signature != b"PK\1\2":
        raise ValueError("a directory entry is broken")
    position += _CENTRAL.size
    name = directory[position : position + name_bytes].decode("utf-8")
    position += name_bytes
    if 0xFFFFFFFF in (packed, size, header):
        packed, size, header = _zip64(directory[position : position + extra_bytes], packed, size, header)
    if fields[15] > 1 or fields[17] & _IS_FOLDER:
        raise ValueError("a directory entry of another disk, or of a folder")
    if method != 0 or flags & _REFUSED_FLAGS or packed != size:
        raise ValueError(f"record {name!r:.80} is compressed or encrypted, which torch never does")
    return name, crc, size, header, position + extra_bytes + comment_bytes


def _zip64(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    position = 0
    while position + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1:
            values = iter(struct.unpack(f"<{num_bytes // 8}Q", extra[position : position + num_bytes // 8 * 8]))
            try:
                size = next(values) if size == 0xFFFFFFFF else size
                packed = next(values) if packed == 0xFFFFFFFF else packed
                header = next(values) if header == 0xFFFFFFFF else header
            except StopIteration:
                raise ValueError("a 64-bit size is missing") from None
            return packed, size, header
        position += num_bytes
    raise ValueError("a 64-bit size is missing")


def _content_start(window: _Window, header: int, name: str) -> int:
    fields = _LOCAL.unpack(window.get(header, _LOCAL.size))
    if fields[0] != b"PK\3\4" or fields[9] != len(name.encode()):
        raise ValueError(f"the header of record {name!r:.80} is broken")
    return int(header + _LOCAL.size + fields[9] + fields[10])


def locate(archive: Archive, tensor: TensorRef, file: str, offsets: Shape, lengths: Shape) -> Chunk:
    """Return the chunk of a tensor that ``archive`` holds.

    Args:
        archive: Where the tensor's storage is.
        tensor: The tensor, as ``data.pkl`` describes it.
        file: The file's name for the chunk.
        offsets: The chunk's place in the whole tensor.
        lengths: The chunk's extent; the tensor must have this shape.

    Raises:
        MalformedFile: Shape, strides or sizes reach beyond the storage.
    """
    record = archive.data_record(tensor.storage.key)
    itemsize = tensor.dtype.itemsize
    declared = tensor.storage.size * (tensor.storage.dtype.itemsize if tensor.storage.dtype else 1)
    if declared > record.size:
        raise MalformedFile(f"{archive.where}: a storage of {declared} bytes in a record of {record.size}")
    if tensor.shape != lengths:
        raise ItemMismatch(f"{archive.where}: the stored tensor has shape {tensor.shape}, not {lengths}")
    first = record.start + tensor.offset * itemsize
    span = 0
    if 0 not in tensor.shape:
        span = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))) * itemsize
    if tensor.offset * itemsize + span > record.size:
        raise MalformedFile(f"{archive.where}: the tensor reaches beyond its storage of {record.size} bytes")
    if math.prod(tensor.shape) * itemsize > max(record.size, _MAX_EXPANDED_BYTES):
        raise MalformedFile(f"{archive.where}: a tensor of shape {tensor.shape} in a storage of {record.size} bytes")
    whole = (record.start, record.start + record.size)
    return Chunk(
        offsets=offsets,
        lengths=lengths,
        file=file,
        start=first,
        stop=first + span,
        encoding=Encoding.RAW,
        strides=None if _is_contiguous(tensor) else tensor.strides,
        crc32=record.crc32 if archive.has_crc else None,
        crc_range=None if whole == (first, first + span) else whole,
        conj=tensor.conj,
        neg=tensor.neg,
    )


def _is_contiguous(tensor: TensorRef) -> bool:
    wanted = contiguous_strides(tensor.shape)
    dims = zip(tensor.shape, tensor.strides, wanted, strict=True)
    return 0 in tensor.shape or all(n == 1 or have == want for n, have, want in dims)


_SINGLE: dict[bytes, TensorRef] = {}
"""Parsed ``data.pkl`` of single-tensor items: shards of one shape share their bytes."""


def resolve_item(chunk: Chunk, dtype: DType, read_at: ReadAt, *, where: str) -> Chunk:
    """Return the RAW chunk for a TORCH_ZIP one: a ``.distcp`` item that holds one tensor.

    Raises:
        MalformedFile: The item is damaged.
        ItemMismatch: Its dtype or shape is not the one of the metadata.
        UnsafePickle: Its pickle refers to something that no tensor needs.
    """
    own = recognise_item(read_at, chunk.start, chunk.stop, dtype, chunk.lengths)
    if own is not None:
        start, stop, crc = own
        return chunk._replace(start=start, stop=stop, encoding=Encoding.RAW, crc32=crc)
    archive = open_archive(read_at, chunk.start, chunk.stop, where=where)
    pickle = archive.read("data.pkl")
    tensor = _SINGLE.get(pickle)
    if tensor is not None and not archive.has_crc:
        archive.check_version()  # otherwise the checksums of these records say it
    if tensor is None:
        value = archive.load()
        if not isinstance(value, TensorRef):
            raise ItemMismatch(f"{where}: a tensor was expected, the item holds {type(value).__name__}")
        tensor = value
        if len(_SINGLE) > 4096:
            _SINGLE.clear()
        _SINGLE[pickle] = tensor
    if tensor.dtype != dtype:
        raise ItemMismatch(f"{where}: the metadata says {dtype}, the item holds {tensor.dtype}")
    return locate(archive, tensor, chunk.file, chunk.offsets, chunk.lengths)
