"""Read every byte and compare it with the checksum that its writer recorded: ours per file, torch's per record.

``torch.save`` writes a CRC-32 beside every record since 1.6, which torch itself never looks at. So whoever wrote the
checkpoint, a changed byte is found, and the tensor that it belongs to named.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import Checkpoint, Chunk, Encoding, ObjectEntry, Problem, TensorEntry
from fsdp_ckpt.codec.distcp_item import recognise_item
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible, MalformedFile, UnsafePickle
from fsdp_ckpt.layouts.manifest import Manifest
from fsdp_ckpt.ops.conversion.values import expand
from fsdp_ckpt.ops.validation.headers import is_there, item_problem, load_whole, unsafe_problem
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.run.verify import Record, verify_records
from fsdp_ckpt.store.local import LocalStore

__all__ = ["DeepResult", "check_records", "deep_bytes"]

_ZIP_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass(slots=True)
class DeepResult:
    """What was compared.

    Attributes:
        verified_bytes: Bytes whose checksum was compared, right or wrong.
        unverified: Bytes by file for which none was recorded.
        problems: What is wrong.
        unreadable: Files of which an item could not be read.
    """

    verified_bytes: int = 0
    unverified: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


def deep_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes there are to read, more or less."""
    return sum({file: size for part in checkpoint.parts for file, size in part.files.items()}.values())


def check_records(
    checkpoint: Checkpoint, sources: Sources, manifest: Manifest | None, *, jobs: int, meter: Meter
) -> DeepResult:
    """Compare every checksum.

    Where a manifest of ours lists a file, its checksum covers all bytes; records are looked at one by one only when
    it is wrong, to say which tensor is damaged.

    Args:
        checkpoint: What to read.
        sources: Resolves its chunks.
        manifest: Ours, if there is one.
        jobs: Threads.
        meter: Counts bytes.
    """
    result = DeepResult()
    proven: set[str] = set()
    damaged: list[Record] = []
    if manifest is not None:
        listed = _manifest_records(sources.store, manifest)
        verified_bytes, wrong = verify_records(iter(listed), jobs=jobs, meter=meter)
        result.verified_bytes += verified_bytes
        damaged = [record for record, _ in wrong]
        proven = {record.file for record in listed} - {record.file for record in damaged}
    named: set[str] = set()
    items = iter(_Records(checkpoint, sources, proven, result))
    verified_bytes, wrong = verify_records(items, jobs=jobs, meter=meter)
    result.verified_bytes += verified_bytes
    for record, found in wrong:
        named.add(record.file)
        message = f"{record.what}: bytes {record.start}-{record.stop} have CRC-32 {found:08x}, {record.crc32:08x} "
        result.problems.append(finding("wrong-checksum", record.owner, message + "was recorded"))
    for record in damaged:
        if record.file not in named | result.unreadable:
            message = f"its CRC-32 is not the one in the manifest, {record.crc32:08x}"
            result.problems.append(finding("wrong-checksum", record.file, message))
    return result


def _manifest_records(store: LocalStore, manifest: Manifest) -> list[Record]:
    found = []
    for file, (size, crc) in manifest.files.items():
        try:
            have = store.size(file)
        except MalformedFile:
            continue
        if have == size and os.access(store.path(file), os.R_OK):
            found.append(Record(store, file, 0, size, int(crc, 16), file, file))
    return found


class _Records:
    """Finds the records of all files that are not proven to be right already."""

    def __init__(self, checkpoint: Checkpoint, sources: Sources, proven: set[str], result: DeepResult) -> None:
        self._checkpoint = checkpoint
        self._sources = sources
        self._store = sources.store
        self._proven = proven
        self._result = result
        self._owners: dict[tuple[str, int], str] = {}
        """Keys of tensors by file and first byte of their storage, for files that hold several."""

    def __iter__(self) -> Iterator[Record]:
        files: dict[str, int] = {}
        for part in self._checkpoint.parts:
            files |= part.files
            for tensor in part.tensors.values():
                for chunk in itertools.chain(tensor.chunks, tensor.replicas):
                    if chunk.file not in self._proven and is_there(self._store, chunk):
                        yield from self._of_chunk(tensor, chunk)
            for entry in part.objects.values():
                is_item = bool(entry.start) or entry.file.endswith(".distcp")
                if is_item and not entry.decoded and entry.file not in self._proven and is_there(self._store, entry):
                    yield from self._of_object(entry)
        for file, size in files.items():
            if file.endswith(_ZIP_SUFFIXES) and file not in self._proven:
                yield from self._of_file(file, size)

    def _of_chunk(self, tensor: TensorEntry, chunk: Chunk) -> Iterator[Record]:
        file, key = chunk.file, tensor.key
        what = f"`{key}` in {file}"
        match chunk.encoding:
            case Encoding.RAW:
                place = file, chunk.start if chunk.crc_range is None else chunk.crc_range[0]
                self._owners[place] = f"{self._owners[place]}`, `{key}" if place in self._owners else key
                if not file.endswith(_ZIP_SUFFIXES):
                    self._count_unverified(file, chunk.stop - chunk.start)
            case Encoding.TORCH_ZIP:
                read = self._store.reader(file)
                own = recognise_item(read, chunk.start, chunk.stop, tensor.dtype, chunk.lengths)
                if own is not None:
                    start, stop, crc = own
                    yield Record(self._store, file, start, stop, crc, key, what)
                else:
                    yield from self._of_archive(self._store, file, chunk.start, chunk.stop, owner=key, what=what)
            case Encoding.ZSTD_TORCH_ZIP:
                yield from self._of_compressed(tensor, chunk, what)

    def _of_compressed(self, tensor: TensorEntry, chunk: Chunk, what: str) -> Iterator[Record]:
        try:
            spill, found = self._sources.resolve(tensor, chunk)
        except Incompatible as error:
            self._result.problems.append(finding("no-checksums", tensor.key, f"cannot be looked at: {error.message}"))
        except CorruptCheckpoint as error:
            self._result.problems.append(item_problem(error, tensor.key))
            self._result.unreadable.add(chunk.file)
        else:
            if found.crc32 is None:
                self._count_unverified(chunk.file, chunk.stop - chunk.start)
                return
            yield from self._of_archive(spill, found.file, 0, spill.size(found.file) or 0, owner=tensor.key, what=what)

    def _of_object(self, entry: ObjectEntry) -> Iterator[Record]:
        what = f"`{entry.key}` in {entry.file}"
        if entry.encoding is Encoding.TORCH_ZIP:
            yield from self._of_archive(self._store, entry.file, entry.start, entry.stop, owner=entry.key, what=what)
        elif entry.encoding is Encoding.ZSTD_TORCH_ZIP:
            self._check_compressed(entry, what)
        else:
            self._count_unverified(entry.file, entry.stop - entry.start)

    def _check_compressed(self, entry: ObjectEntry, what: str) -> None:
        """Look at an object as a whole: it is small, and nobody else has seen its head."""
        result = self._result
        try:
            data = expand(self._store.reader(entry.file)(entry.start, entry.stop - entry.start), what)
            archive = open_archive(lambda start, size: data[start : start + size], 0, len(data), where=what)
            load_whole(archive)
            for name, record in archive.records.items():
                archive.read(name)
                result.verified_bytes += record.size
        except Incompatible as error:
            result.problems.append(finding("no-checksums", entry.key, f"cannot be looked at: {error.message}"))
        except UnsafePickle as error:
            result.problems.append(unsafe_problem(error, entry.key, what))
        except CorruptCheckpoint as error:
            result.problems.append(item_problem(error, entry.key))
            result.unreadable.add(entry.file)

    def _of_file(self, file: str, size: int) -> Iterator[Record]:
        if self._store.size(file) != size or not os.access(self._store.path(file), os.R_OK):
            return
        if self._store.reader(file)(0, min(size, 2)) == b"PK":
            yield from self._of_archive(self._store, file, 0, size, owner=file, what=file)
        else:  # torch before 1.6, or a bare pickle
            self._count_unverified(file, size)

    def _of_archive(
        self, store: LocalStore, file: str, start: int, stop: int, *, owner: str, what: str
    ) -> Iterator[Record]:
        try:
            archive = open_archive(store.reader(file), start, stop, where=file)
        except CorruptCheckpoint:  # its head was looked at before
            return
        for record in archive.records.values():
            if not archive.has_crc:
                self._count_unverified(file, record.size)
                continue
            key = self._owners.get((file, record.start), owner)
            shown = what
            if owner == file:
                shown = f"`{key}` in {file}" if key != file else f"{file}, record {record.name}"
            yield Record(store, file, record.start, record.start + record.size, record.crc32, key, shown)

    def _count_unverified(self, file: str, num_bytes: int) -> None:
        unverified = self._result.unverified
        unverified[file] = unverified.get(file, 0) + num_bytes
