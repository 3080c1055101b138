"""Write one part of a checkpoint as torch.distributed.checkpoint lays it out: a data file per rank, then ``.metadata``.

Each rank streams its own boxes from memory to its file, checksummed on the way; nothing is gathered but their places.
Tied tensors are stored once: all of their names point at the same bytes. The result is read by torch 2.3 and newer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_ckpt.catalog import DTYPES, Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo
from fsdp_ckpt.codec.dcp_metadata_writer import write_metadata
from fsdp_ckpt.codec.distcp_item import lay_out_item
from fsdp_ckpt.codec.stamp import STAMP_BYTES, make_stamp
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible
from fsdp_ckpt.layouts.roles import KeyPath
from fsdp_ckpt.plan.boxes import check_coverage
from fsdp_ckpt.train.live import LiveTensor, dtype_of, stored_pieces
from fsdp_ckpt.train.record_file import OBJECT_ALIGNMENT, RecordFile

__all__ = ["MetadataCache", "ShardWriter", "Share", "ShareSummary", "assemble"]

_CACHED = 8
"""Files that are kept: those of a model and an optimizer, and of a few more."""


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

    def digest(self) -> str:
        """Return a digest of everything that ``.metadata`` is made of: equal ones make equal files."""
        tensors = self.tensors.items()
        places = [(key, dtype, shape, [item[:-1] for item in items]) for key, (dtype, shape, items) in tensors]
        content = (self.file, places, list(self.objects.items()), list(self.paths.items()), list(self.aliases.items()))
        return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()

    def summary(self) -> ShareSummary:
        """Return what the first rank has to know when nothing but values has changed since the last save."""
        return ShareSummary(file=self.file, size=self.size, crc32=self.crc32, digest=self.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSummary:
    """A rank's file, and a digest of where in it everything lies."""

    file: str | None
    size: int
    crc32: int
    digest: str


class MetadataCache:
    """The ``.metadata`` of the last saves, by the digests of all ranks' shares.

    A job saves the same tensors to the same places again and again. Gathering millions of boxes and writing them down
    takes the first rank minutes; after the first save it is looked up.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, ...], bytes] = OrderedDict()

    def get(self, summaries: Sequence[ShareSummary]) -> bytes | None:
        """Return what was put for such shares; None when they are new."""
        key = tuple(one.digest for one in summaries)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, summaries: Sequence[ShareSummary], metadata: bytes) -> None:
        """Keep a file, and forget the one that was not used for the longest time."""
        self._known[tuple(one.digest for one in summaries)] = metadata
        if len(self._known) > _CACHED:
            self._known.popitem(last=False)


class ShardWriter:
    """Writes this rank's file.

    Args:
        folder: The part's folder.
        rank: This rank, for the file's name.
        save_id: Of the save; the file begins with it.
        durable: Wait until the disk has it all.
    """

    def __init__(self, folder: Path, rank: int, *, save_id: str, durable: bool) -> None:
        stamp = make_stamp(save_id, rank)
        self._file = RecordFile(folder / f"__{rank}_0.distcp", durable=durable, stamp=stamp)
        self.share = Share()

    def expect(self, tensors: Iterable[LiveTensor], objects: Iterable[bytes]) -> None:
        """Say what is going to be added, so that the disk space is reserved when the first of it is."""
        size = STAMP_BYTES
        for tensor in tensors:
            for piece in stored_pieces(tensor):
                size = lay_out_item(dtype_of(tensor.dtype, tensor.name), piece.lengths, size).stop
        self._file.expected_bytes = size + sum(len(data) + OBJECT_ALIGNMENT for data in objects)

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
        dtype = dtype_of(tensor.dtype, tensor.name)
        items = []
        for piece in stored_pieces(tensor):
            written = self._file.add_tensor(piece.tensor, dtype)
            items.append((piece.offsets, piece.lengths, written.start, written.num_bytes, written.crc))
        if items:
            self.share.tensors[key] = (dtype.name, tensor.shape, items)

    def add_object(self, path: KeyPath, data: bytes) -> None:
        """Store a value that is no tensor, encoded by ``objects.encode``."""
        key = _key(path)
        written = self._file.add_bytes(data)
        self.share.paths[key] = path
        self.share.objects[key] = (written.start, written.num_bytes)

    def close(self) -> Share:
        """Finish the file.

        Returns:
            What was written, for ``assemble``.
        """
        if self._file.is_open:
            self.share.file = self._file.path.name
            self.share.size, self.share.crc32 = self._file.close()
        return self.share

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.abort()


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


def assemble(shares: Sequence[Share]) -> tuple[bytes, bool]:
    """Return the ``.metadata`` of a part from what all ranks wrote.

    Returns:
        The file, and whether it follows from the places alone: where ranks stored copies, values were compared, and
        must be again.

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
    has_copies = False
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
                    has_copies = True
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
    return write_metadata(metadata), not has_copies


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
