"""torch.distributed.checkpoint folders: ``.metadata`` and ``__R_N.distcp``, from torch 2.1 on.

Also what other writers make of it: one metadata file per rank (``use_collectives=False``), safetensors blobs in
``.distcp`` files, zstd streams, and the metadata classes of Megatron-core, OLMo-core and ByteCheckpoint.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fsdp_ckpt.catalog import Chunk, Encoding, ObjectEntry, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo, read_metadata
from fsdp_ckpt.codec.safetensors import Header, read_header
from fsdp_ckpt.errors import CorruptCheckpoint, Incompatible, ItemMismatch, NotEnoughSpace, PathOutside
from fsdp_ckpt.layouts.elsewhere import note_elsewhere, of_rank, rank_of
from fsdp_ckpt.layouts.faults import coverage_problems, flat_reason
from fsdp_ckpt.layouts.roles import KeyPath, Split, split_roles
from fsdp_ckpt.plan.boxes import Box
from fsdp_ckpt.store.local import Folder
from fsdp_ckpt.store.memory import available_memory, no_gc
from fsdp_ckpt.units import format_size

__all__ = ["looks_like_dcp", "read_dcp"]

DATA_FILE = re.compile(r"(?:.*__)?(\d{1,9})_\d+\.distcp|__(\d{1,9})_\d+\.distcp")
RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_ZSTD = "stream.zstd/1"
_LARGE_METADATA_BYTES = 64 << 20
_MEMORY_FACTOR = 4.5
"""Peak memory over the size of the metadata, measured at a million chunks: 3.6."""


def looks_like_dcp(folder: Folder) -> bool:
    """Tell whether a folder holds a distributed checkpoint, or what is left of one."""
    return any(
        name in (".metadata", ".metadata.tmp") or name.endswith(".distcp") or RANK_METADATA.fullmatch(name)
        for name in folder.files
    )


def read_dcp(folder: Folder, *, name: str | None = None, role: Role | None = None) -> list[Part]:
    """Read a folder.

    Args:
        folder: The folder.
        name: Name of the part when the folder is one thing (``pytorch_model_fsdp_0``); parts are named by the keys
            that they stand under otherwise.
        role: Role of keys that do not tell it themselves.

    Returns:
        The parts, models first. Without any metadata: one part without tensors, with a problem that says so.

    Raises:
        UnsafePickle: The metadata refer to an unknown global.
        MalformedFile: The metadata are broken or lead out of the folder.
    """
    data_files = {file: size for file, size in folder.files.items() if file.endswith(".distcp")}
    per_rank = sorted(file for file in folder.files if RANK_METADATA.fullmatch(file))
    sources = [".metadata"] if ".metadata" in folder.files else per_rank
    frame = Part(
        name=name or "model",
        role=role or Role.MODEL,
        dialect="dcp",
        folder=folder.prefix.rstrip("/"),
        files={folder.prefix + file: size for file, size in data_files.items()},
        world_size=_world_size(data_files, per_rank),
        problems=list(_leftovers(folder)),
    )
    if not sources:
        what = f"{len(data_files)} data files, but no .metadata" if data_files else "neither .metadata nor data files"
        why = f"{what}: a save was cut off" + (", or it is on another node" if data_files else "")
        missing = _problem(Severity.ERROR, "missing-metadata", folder, ".metadata", why)
        return [replace(frame, problems=[missing, *frame.problems])]
    _check_memory(folder, sources)
    build = _Builder(folder)
    with no_gc():
        for source in sources:
            where = folder.prefix + source
            data = folder.store.read(where, limit_bytes=folder.files[source])  # memory was checked
            build.add(read_metadata(data, where=where), source)
    files = {
        folder.prefix + file: folder.files[file] for file in folder.files if file in build.files or file in sources
    }
    empty = [file for file, size in data_files.items() if not size]  # of ranks that had nothing to write
    world_size = _world_size([*empty, *build.files], per_rank)
    frame = replace(frame, files=files, writer=build.writer, world_size=world_size)
    problems = [*frame.problems, *build.problems()]
    splits = split_roles(build.paths.items(), default=role or Role.MODEL)
    parts: list[Part] = []
    for split in splits:
        tensors = {key: _placed(build.tensors[key], split) for key in split.names if key in build.tensors}
        objects = {key: _placed(build.objects[key], split) for key in split.names if key in build.objects}
        holes = list(coverage_problems(tensors.values(), prefix=folder.prefix))
        if holes and sources is per_rank:  # other ranks' metadata may be missing, too
            problems = [*note_elsewhere(folder, (), (), holes=True), *problems]
        parts.append(
            replace(
                frame,
                name=split.name if parts or name is None else name,
                role=role if role is not None and len(splits) == 1 else split.role,
                tensors=tensors,
                objects=objects,
                flat=flat_reason(tensors.values()),
                problems=[*([] if parts else problems), *holes],
            )
        )
    return parts or [replace(frame, problems=problems)]


_Entry = TypeVar("_Entry", TensorEntry, ObjectEntry)


def _placed(entry: _Entry, split: Split) -> _Entry:
    return replace(entry, name=split.names[entry.key], path=split.paths[entry.key])


@dataclass(slots=True)
class _DataFile:
    """A file that the metadata refer to, and where its last item ends."""

    path: str
    end: int = 0
    last_key: str = ""


@dataclass
class _Builder:
    """Collects what one or several metadata files say."""

    folder: Folder
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    paths: dict[str, KeyPath] = field(default_factory=dict)
    files: dict[str, _DataFile] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    misnamed: list[tuple[str, KeyPath | None]] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    writer: str | None = None
    _blobs: dict[tuple[str, int], Header] = field(default_factory=dict)
    _claimed: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Keys by blob, as far as the metadata say that they are in it."""

    def add(self, metadata: DcpMetadata, source: str) -> None:
        self.writer = metadata.writer
        raw = metadata.writer == "ByteCheckpoint"
        self._compare_names(metadata)
        self._compare_rank(metadata, source)
        items = {*metadata.tensors, *metadata.objects}
        for key, path in metadata.paths.items():  # in the order of the state dict; that of items follows who wrote them
            if key in items:
                self.paths.setdefault(key, path or (key,))
        for key, tensor in metadata.tensors.items():
            self.paths.setdefault(key, metadata.paths.get(key) or (key,))
            found = self._chunks(key, tensor, metadata.storage, raw)
            known = self.tensors.get(key)
            if known is None:
                self.tensors[key] = TensorEntry(
                    key=key, name=key, dtype=tensor.dtype, shape=tensor.shape, chunks=tuple(found)
                )
            else:
                self.tensors[key] = _merge_ranks(known, tensor, found)
        for key in metadata.objects:
            self.paths.setdefault(key, metadata.paths.get(key) or (key,))
            info = metadata.storage.get((key, None))
            if info is None:
                self.unlisted.append(key)
            elif key not in self.objects:
                file, start, length, transforms = info
                if start < 0 or length < 0:
                    raise CorruptCheckpoint(f"{self.folder.prefix}.metadata: `{key}` lies at an impossible place")
                self._note_end(key, file, start + length)
                self.objects[key] = ObjectEntry(
                    key=key, name=key, file=self.folder.prefix + file, start=start, stop=start + length,
                    encoding=_encoding(key, transforms),
                )  # fmt: skip

    def _compare_names(self, metadata: DcpMetadata) -> None:
        """Note keys whose path is another one: torch makes the key of the path.

        There may be paths without items: torch before 2.4 kept those of objects that only other ranks had.
        """
        paths = metadata.paths
        for key in itertools.chain(metadata.tensors, metadata.objects) if paths else ():
            path = paths.get(key)
            if path is None or ".".join(map(str, path)) != key:
                self.misnamed.append((key, path))

    def _compare_rank(self, metadata: DcpMetadata, source: str) -> None:
        """Note metadata of one rank that are about the files of another one."""
        match = RANK_METADATA.fullmatch(source)
        files = {info[0] for info in metadata.storage.values()} if match else set()
        if match and any(rank_of(file) not in (None, int(match[1])) for file in files):
            self.misplaced.append(source)

    def _chunks(
        self, key: str, tensor: DcpTensor, storage: Mapping[tuple[str, Shape | None], StorageInfo], raw: bool
    ) -> list[Chunk]:
        # The one loop over everything: a large checkpoint has millions of chunks.
        found: list[Chunk] = []
        new, prefix, files = tuple.__new__, self.folder.prefix, self.files
        itemsize, known_lengths, num_bytes = tensor.dtype.itemsize, None, 0
        for offsets, lengths in tensor.chunks:
            info = storage.get((key, offsets))
            if info is None:
                if 0 not in lengths:
                    self.unlisted.append(key)
                continue
            name, start, length, transforms = info
            if lengths is not known_lengths:
                known_lengths, num_bytes = lengths, math.prod(lengths) * itemsize
            encoding = Encoding.TORCH_ZIP
            if transforms:
                encoding = _encoding(key, transforms)
            elif length == num_bytes:  # an archive is always longer than the tensor in it
                if length and not raw:
                    found.append(self._blob_chunk(key, tensor, (offsets, lengths), name, start))
                    continue
                if raw or self._is_blob(name, start):
                    encoding = Encoding.RAW
            if start < 0 or length < 0:
                raise CorruptCheckpoint(f"{prefix}.metadata: `{key}` lies at an impossible place in {name}")
            file = files.get(name) or self._file(name)
            stop = start + length
            if stop > file.end:
                file.end, file.last_key = stop, key
            found.append(
                new(Chunk, (offsets, lengths, file.path, start, stop, encoding, None, None, None, False, False))
            )
        return found

    def _is_blob(self, file: str, start: int) -> bool:
        """Tell whether a tensor without elements stands in a blob."""
        path = self.folder.prefix + file
        size = self.folder.store.size(path)
        return size is not None and start + 9 <= size and self.folder.store.reader(path)(start + 8, 1) == b"{"

    def _file(self, name: str) -> _DataFile:
        return self.files.setdefault(name, _DataFile(path=self.folder.prefix + name))

    def _note_end(self, key: str, file: str, stop: int) -> None:
        data = self._file(file)
        if stop > data.end:
            data.end, data.last_key = stop, key

    def _blob_chunk(self, key: str, tensor: DcpTensor, box: Box, file: str, start: int) -> Chunk:
        """Find a tensor in the safetensors blob that SerializationFormat.SAFETENSORS writes.

        The metadata give all tensors of a blob the place where the blob begins, and their own length.
        """
        path = self.folder.prefix + file
        size = self.folder.store.size(path)
        if size is None:
            self._note_end(key, file, start)
            return Chunk(box[0], box[1], path, start, start)
        header = self._blobs.get((file, start))
        if header is None:
            header = self._blobs[file, start] = read_header(self.folder.store.reader(path), start, size, where=path)
            self._note_end(key, file, size)
        self._claimed.setdefault((file, start), set()).add(key)
        for item in header.tensors:
            if item.name == key:
                if item.dtype != tensor.dtype or item.shape != box[1]:
                    raise ItemMismatch(f"{path}: `{key}` is not what the metadata say")
                return Chunk(box[0], box[1], path, item.start, item.stop)
        raise CorruptCheckpoint(f"{path}: `{key}` is missing")

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the files."""
        folder = self.folder
        sizes: dict[str, int | None] = {}
        for file, data in list(self.files.items()):
            try:
                sizes[file] = folder.store.size(data.path)
            except PathOutside as error:
                if not (folder.path / file).is_symlink():  # somebody's own link to another disk, perhaps
                    raise
                yield _problem(Severity.ERROR, "path-outside", folder, file, error.message)
        missing = [rank_of(file) for file, size in sizes.items() if size is None]
        yield from note_elsewhere(folder, missing, map(rank_of, folder.files))
        for file, size in sizes.items():
            data = self.files[file]
            end = data.end
            if size is None:
                message = f"listed in the metadata, but not there{of_rank(file)}"
                if (folder.path / file).is_symlink():
                    message = f"a link to `{os.readlink(folder.path / file)}`, which does not exist{of_rank(file)}"
                yield _problem(Severity.ERROR, "missing-file", folder, file, message)
            elif size < end:
                message = f"has {size} bytes, but holds items up to byte {end} (`{data.last_key}`)"
                yield _problem(Severity.ERROR, "short-file", folder, file, message)
        for key in self.unlisted[:10]:
            yield _problem(Severity.ERROR, "unlisted-item", folder, key, "the metadata do not say where it is stored")
        for key, path in self.misnamed[:10]:
            shown = "no path" if path is None else f"the path {'.'.join(map(str, path))!r:.200}"
            yield _problem(Severity.ERROR, "name-mismatch", folder, key, f"the metadata give it {shown}")
        for source in self.misplaced:
            yield _problem(Severity.ERROR, "misplaced-file", folder, source, "it is about the files of another rank")
        yield from self._unclaimed()
        stale = [
            file for file in folder.files if file.endswith(".distcp") and file not in self.files and folder.files[file]
        ]
        for file in stale:
            yield _problem(
                Severity.WARNING,
                "stale-file",
                folder,
                file,
                "not referenced by the metadata, left from an earlier save",
            )

    def _unclaimed(self) -> Iterator[Problem]:
        """Yield tensors of blobs that the metadata do not mention."""
        for (file, start), header in self._blobs.items():
            claimed = self._claimed[file, start]
            unknown = [item.name for item in header.tensors if item.stop > item.start and item.name not in claimed]
            if unknown:
                message = f"{len(unknown)} of {len(header.tensors)} tensors belong to no item, first `{unknown[0]}`"
                yield _problem(Severity.ERROR, "unclaimed-bytes", self.folder, file, message)


def _merge_ranks(known: TensorEntry, tensor: DcpTensor, found: list[Chunk]) -> TensorEntry:
    if known.dtype != tensor.dtype or known.shape != tensor.shape:
        raise CorruptCheckpoint(f"`{known.key}` has another dtype or shape in the metadata of another rank")
    have = {(chunk.offsets, chunk.lengths) for chunk in known.chunks}
    fresh = [chunk for chunk in found if (chunk.offsets, chunk.lengths) not in have]
    again = [chunk for chunk in found if (chunk.offsets, chunk.lengths) in have]
    return replace(known, chunks=(*known.chunks, *fresh), replicas=(*known.replicas, *again))


def _encoding(key: str, transforms: tuple[str, ...]) -> Encoding:
    if not transforms:
        return Encoding.TORCH_ZIP
    if transforms == (_ZSTD,):
        return Encoding.ZSTD_TORCH_ZIP
    raise Incompatible(f"`{key}` is stored through {', '.join(map(str, transforms))}, which is not supported")


def _world_size(data_files: Iterable[str], per_rank: list[str]) -> int | None:
    ranks = [int(match[1] or match[2]) for name in data_files if (match := DATA_FILE.fullmatch(name))]
    ranks += [int(match[1]) for name in per_rank if (match := RANK_METADATA.fullmatch(name))]
    return max(ranks) + 1 if ranks else None


def _leftovers(folder: Folder) -> Iterator[Problem]:
    for file in folder.files:
        if file.endswith(".metadata.tmp"):
            yield _problem(
                Severity.WARNING,
                "unfinished-metadata",
                folder,
                file,
                "left by a save that was cut off while it finished",
            )


def _problem(severity: Severity, code: str, folder: Folder, where: str, message: str) -> Problem:
    return Problem(severity=severity, code=code, where=folder.prefix + where, message=message)


def _check_memory(folder: Folder, sources: list[str]) -> None:
    num_bytes = sum(folder.files[source] for source in sources)
    needed, free = num_bytes * _MEMORY_FACTOR, available_memory()
    if num_bytes > _LARGE_METADATA_BYTES and free is not None and needed > free:
        raise NotEnoughSpace(
            f"{folder.prefix}{sources[0]} has {format_size(num_bytes)}: reading it takes about {format_size(needed)} "
            f"of memory, {format_size(free)} are free",
            hint="run it on a machine with more memory",
        )
