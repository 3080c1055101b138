"""Write one part of a checkpoint as torch.distributed.checkpoint lays it out: a data file per rank, then ``.metadata``.

Each rank streams its own boxes from memory to its file, checksummed on the way; nothing is gathered but their places.
Tied tensors are stored once: all of their names point at the same bytes. The result is read by torch 2.3 and newer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_ckpt.catalog import DTYPES, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.distcp_item import lay_out_item, seal_item
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.run.checksum import checksum_range, combine_crc, crc32
from fsdp_ckpt.store.syscalls import start_writeback, write_all
from fsdp_ckpt.train.files import open_new
from fsdp_ckpt.train.live import LiveTensor, dtype_of
from fsdp_ckpt.train.memory import byte_blocks

__all__ = ["ShardWriter", "Share", "assemble"]

_WRITEBACK_BYTES = 32 << 20
_OBJECT_ALIGNMENT = 64


@dataclass(kw_only=True)
class Share:
    """What one rank wrote of a part; travels to the first rank.

    Attributes:
        file: Name of its file; None when it had nothing to write.
        size: Bytes of the file.
        crc32: Checksum of the whole file.
        tensors: By key: dtype, whole shape, and (offsets, lengths, start, number of bytes, CRC-32 of the elements) of
            each item.
        objects: By key: start and number of bytes.
        paths: Place in the nested state dict, by key.
        aliases: Key of the tensor whose bytes a further key shares.
    """

    file: str | None = None
    size: int = 0
    crc32: int = 0
    tensors: dict[str, tuple[str, Shape, list[tuple[Shape, Shape, int, int, int]]]] = field(default_factory=dict)
    objects: dict[str, tuple[int, int]] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


class ShardWriter:
    """Writes this rank's file.

    Args:
        folder: The part's folder.
        rank: This rank, for the file's name.
        durable: Wait until the disk has it all.
    """

    def __init__(self, folder: Path, rank: int, *, durable: bool) -> None:
        self._path = folder / f"__{rank}_0.distcp"
        self._durable = durable
        self._fd = -1
        self._position = 0
        self._flushed = 0
        self._crc: int | None = 0
        self.share = Share()

    def add_tensor(self, path: KeyPath, tensor: LiveTensor) -> None:
        """Store this rank's pieces of a tensor, when it is its turn to do so.

        Args:
            path: Its place in the nested state dict.
            tensor: The tensor.

        Raises:
            OSError: The disk is full or broken.
        """
        key = _key(path)
        self.share.paths[key] = path
        for alias in tensor.aliases:
            self.share.aliases[_key((*path[:-1], alias))] = key
            self.share.paths[_key((*path[:-1], alias))] = (*path[:-1], alias)
        if not tensor.writes:
            return
        dtype = dtype_of(tensor.dtype, tensor.name)
        items = []
        for piece in tensor.pieces:
            if 0 in piece.lengths and 0 not in tensor.shape:
                continue
            layout = lay_out_item(dtype, piece.lengths, self._position)
            crc, position = 0, layout.data_start
            for block in byte_blocks(piece.tensor, dtype):
                crc = crc32(block, crc)
                write_all(self._file(), block, position)
                position += len(block)
            head, tail = seal_item(layout, crc)
            write_all(self._file(), head, layout.start)
            write_all(self._file(), tail, layout.data_stop)
            self._account(bytes(layout.start - self._position) + head)
            self._account_crc(crc, layout.data_stop - layout.data_start)
            self._account(tail)
            items.append((piece.offsets, piece.lengths, layout.start, layout.stop - layout.start, crc))
        if items:
            self.share.tensors[key] = (dtype.name, tensor.shape, items)

    def add_object(self, path: KeyPath, data: bytes) -> None:
        """Store a value that is no tensor, encoded by ``objects.encode``."""
        key = _key(path)
        gap = -self._position % _OBJECT_ALIGNMENT
        start = self._position + gap
        write_all(self._file(), data, start)
        self._account(bytes(gap) + data)
        self.share.paths[key] = path
        self.share.objects[key] = (start, len(data))

    def close(self) -> Share:
        """Finish the file.

        Returns:
            What was written, for ``assemble``.
        """
        if self._fd < 0:
            return self.share
        if self._durable:
            os.fsync(self._fd)
        if self._crc is None:  # no library that combines checksums
            self._crc = checksum_range(self._fd, 0, self._position)
        self.abort()
        self.share.file, self.share.size, self.share.crc32 = self._path.name, self._position, self._crc
        return self.share

    def abort(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _file(self) -> int:
        if self._fd < 0:
            self._fd = open_new(self._path)
        return self._fd

    def _account(self, data: bytes) -> None:
        self._account_crc(crc32(data, 0), len(data))

    def _account_crc(self, crc: int, num_bytes: int) -> None:
        """Take bytes that follow the ones so far into the file's checksum, and start writing them to disk."""
        if self._crc is not None and num_bytes:
            self._crc = combine_crc(self._crc, crc, num_bytes)
        self._position += num_bytes
        if self._durable and self._position - self._flushed >= _WRITEBACK_BYTES:
            start_writeback(self._fd, self._flushed, self._position - self._flushed)
            self._flushed = self._position


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


def assemble(shares: Sequence[Share]) -> bytes:
    """Return the ``.metadata`` of a part from what all ranks wrote.

    Raises:
        CorruptCheckpoint: The ranks' boxes do not tile a tensor; nothing may be committed then.
        Incompatible: The ranks disagree about a tensor's dtype or shape.
    """
    tensors: dict[str, DcpTensor] = {}
    objects: list[str] = []
    storage: dict[tuple[str, Shape | None], StorageInfo] = {}
    boxes: dict[tuple[str, Shape], tuple[Shape, int]] = {}
    paths: dict[str, KeyPath] = {}
    aliases: dict[str, str] = {}
    for rank, share in enumerate(shares):
        paths |= share.paths
        aliases |= share.aliases
        for key, (start, num_bytes) in share.objects.items():
            if (key, None) not in storage:
                objects.append(key)
                storage[key, None] = (str(share.file), start, num_bytes, ())
        for key, (dtype, shape, items) in share.tensors.items():
            known = tensors.setdefault(key, DcpTensor(dtype=DTYPES[dtype], shape=shape, chunks=[]))
            if (known.dtype.name, known.shape) != (dtype, shape):
                raise Incompatible(
                    f"`{key}` is {dtype} {shape} on rank {rank}, {known.dtype} {known.shape} on an earlier one"
                )
            for offsets, lengths, start, num_bytes, crc in items:
                if (key, offsets) in storage:
                    if boxes[key, offsets] == (lengths, crc):  # copies on meshes apart: FSDP2 within tensor parallelism
                        continue
                    raise Incompatible(
                        f"rank {rank} holds `{key}` at {offsets} with other values than an earlier rank",
                        hint="tensors that differ between ranks need names of their own",
                    )
                boxes[key, offsets] = (lengths, crc)
                known.chunks.append((offsets, lengths))
                storage[key, offsets] = (str(share.file), start, num_bytes, ())
    _check_all_there(tensors, paths, aliases, objects)
    for alias, key in aliases.items():
        tensors[alias] = tensors[key]
        for offsets, _ in tensors[key].chunks:
            storage[alias, offsets] = storage[key, offsets]
    metadata = DcpMetadata(tensors=tensors, objects=objects, paths=paths, storage=storage, writer="fsdp-ckpt")
    return write_metadata(metadata)


def _check_all_there(
    tensors: dict[str, DcpTensor], paths: dict[str, KeyPath], aliases: dict[str, str], objects: Iterable[str]
) -> None:
    stored = tensors.keys() | aliases.keys() | set(objects)
    lacking = [key for key in paths if key not in stored]
    if lacking:
        raise CorruptCheckpoint(f"no rank stored `{lacking[0]}`" + _more(lacking))
    for key, tensor in tensors.items():
        tensor.chunks.sort()
        found = check_coverage(tensor.shape, tensor.chunks)
        if not found.is_exact:
            fault = "two boxes overlap" if found.overlap else f"nothing was stored of the box at {found.missing}"
            raise CorruptCheckpoint(f"the ranks do not hold `{key}` {tensor.shape} between them: {fault}")


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} others" if len(names) > 1 else ""
