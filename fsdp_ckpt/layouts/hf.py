"""safetensors folders: one file, Hugging Face shards with an index, and what torch's HuggingFaceStorageWriter leaves.

The last writes one file per rank (``shard-00001-model-00001-of-00002.safetensors``) whose header says where the
pieces belong (``DCP_SHARDING_INFO``), often in a folder ``sharded/`` beside the consolidated files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.catalog import Chunk, Part, Problem, Role, Severity, Shape, TensorEntry
from fsdp_ckpt.codec.safetensors import Header, read_header
from fsdp_ckpt.errors import CorruptCheckpoint, MalformedFile
from fsdp_ckpt.layouts.faults import coverage_problems
from fsdp_ckpt.layouts.roles import split_roles
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["INDEX", "is_rank_shard", "read_safetensors"]

INDEX = "model.safetensors.index.json"
_RANK_SHARD = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def is_rank_shard(name: str) -> bool:
    """Tell whether a file name is one of torch's sharded writer."""
    return _RANK_SHARD.fullmatch(name) is not None


def read_safetensors(
    folder: Folder, names: Iterable[str], *, name: str = "model", role: Role = Role.MODEL
) -> list[Part]:
    """Read safetensors files that belong together.

    Args:
        folder: Where they are.
        names: The files.
        name: Name of the part.
        role: Its role when the keys do not tell otherwise.

    Returns:
        One part.

    Raises:
        MalformedFile: A header breaks the rules of the format.
    """
    files = sorted(names)
    gather = _Gather(folder)
    for number, file in enumerate(files):
        if number % _TOGETHER == 0:
            folder.store.prefetch_heads([folder.prefix + name for name in files[number : number + _TOGETHER]])
        gather.add(file, _header(folder.store, folder.prefix + file, folder.files[file]))
    index_name = next((n for n in (INDEX, f"{name}.safetensors.index.json") if n in folder.files), None)
    problems = list(gather.problems)
    if len(files) == 1 and _NUMBERED.fullmatch(files[0]) and _is_one_of_several(folder, files[0]):
        pass  # one file of a set was asked for: what the others hold is not its fault
    elif index_name is not None and not any(is_rank_shard(file) for file in files):
        problems += _check_index(folder, index_name, gather)
    else:
        problems += _missing_numbers(folder, files)
    tensors = gather.entries()
    splits = split_roles(((key, (key,)) for key in tensors), default=role)
    ranks = [int(match[1]) for file in files if (match := _RANK_SHARD.fullmatch(file))]
    sizes = {folder.prefix + file: folder.files[file] for file in files}
    parts = []
    for number, split in enumerate(splits):
        parts.append(
            Part(
                name=name if number == 0 else split.name,
                role=split.role,
                dialect="safetensors",
                folder=folder.prefix.rstrip("/"),
                files=sizes,
                tensors={key: tensors[key] for key in split.names},
                world_size=max(ranks) if ranks else None,
                writer="torch HuggingFaceStorageWriter" if ranks else None,
                problems=[*([] if number else problems), *coverage_problems(tensors[key] for key in split.names)],
            )
        )
    return parts or [
        Part(
            name=name,
            role=role,
            dialect="safetensors",
            folder=folder.prefix.rstrip("/"),
            files=sizes,
            problems=problems,
        )
    ]


def _is_one_of_several(folder: Folder, file: str) -> bool:
    """Tell whether other files of a numbered set are there."""
    stem, _, total = _NUMBERED.fullmatch(file).groups()  # type: ignore[union-attr]  # the caller looked
    others = (match for name in folder.files if name != file and (match := _NUMBERED.fullmatch(name)))
    return any((match[1], match[3]) == (stem, total) for match in others)


def _header(store: LocalStore, file: str, size: int) -> Header:
    return read_header(store.reader(file), 0, size, where=file)


_TOGETHER = 64
"""Files whose heads are asked for together where they are remote."""


@dataclass
class _Gather:
    folder: Folder
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, file: str, header: Header) -> None:
        offsets = _saved_offsets(header.metadata, self.folder.prefix + file)
        for item in header.tensors:
            begin = offsets.get(item.name, (0,) * len(item.shape))
            if len(begin) != len(item.shape):
                raise MalformedFile(f"{self.folder.prefix}{file}: `{item.name}` has offsets of another rank")
            chunk = Chunk(begin, item.shape, self.folder.prefix + file, item.start, item.stop)
            if self.dtypes.setdefault(item.name, item.dtype) != item.dtype:
                raise CorruptCheckpoint(f"`{item.name}` has two dtypes, in {self.homes[item.name]} and in {file}")
            known = self.chunks.setdefault(item.name, [])
            if any(other.offsets == chunk.offsets and other.lengths == chunk.lengths for other in known):
                what = "a shard of it" if offsets else "it"
                message = f"{what} stands in {self.homes[item.name]} and in {file}; the first is used"
                self.problems.append(
                    Problem(severity=Severity.WARNING, code="duplicate-tensor", where=item.name, message=message)
                )
                continue
            self.homes.setdefault(item.name, file)
            known.append(chunk)

    def entries(self) -> dict[str, TensorEntry]:
        found = {}
        for key, chunks in self.chunks.items():
            ranks = {len(chunk.lengths) for chunk in chunks}
            if len(ranks) > 1:
                raise CorruptCheckpoint(f"`{key}` has pieces of different rank")
            # The whole shape is not recorded; torch takes the furthest corner, and so do we.
            shape: Shape = tuple(
                max(chunk.offsets[dim] + chunk.lengths[dim] for chunk in chunks) for dim in range(ranks.pop())
            )
            found[key] = TensorEntry(key=key, name=key, dtype=self.dtypes[key], shape=shape, chunks=tuple(chunks))
        return found


def _saved_offsets(metadata: Mapping[str, str], where: str) -> dict[str, Shape]:
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None:
        return {}
    try:
        offsets = {key: tuple(item["saved_offsets"]) for key, item in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedFile(f"{where}: DCP_SHARDING_INFO is broken: {error}") from None
    for place in offsets.values():
        if not all(type(n) is int and 0 <= n < 2**62 for n in place):
            raise MalformedFile(f"{where}: DCP_SHARDING_INFO has impossible offsets")
    return offsets


def _check_index(folder: Folder, index_name: str, gather: _Gather) -> Iterable[Problem]:
    where = folder.prefix + index_name
    try:
        index = json.loads(folder.store.read(where))
        weight_map = index["weight_map"]
        total = index.get("metadata", {}).get("total_size")
        pairs = sorted((str(key), str(file)) for key, file in weight_map.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield Problem(severity=Severity.WARNING, code="bad-index", where=where, message=f"cannot be read: {error}")
        return
    absent = sorted({file for _, file in pairs} - set(folder.files))
    for file in absent:
        yield Problem(
            severity=Severity.ERROR,
            code="missing-file",
            where=folder.prefix + file,
            message=f"listed in {index_name}, but not there",
        )
    for key, file in pairs:
        if file not in absent and gather.homes.get(key) != file:
            elsewhere = f", but in {gather.homes[key]}" if key in gather.homes else ""
            yield Problem(
                severity=Severity.ERROR,
                code="missing-tensor",
                where=key,
                message=f"is not in {file}, as {index_name} says{elsewhere}",
            )
    extra = sorted(gather.homes.keys() - {key for key, _ in pairs})
    if extra:
        message = f"{len(extra)} tensors are not in {index_name}, first `{extra[0]}`"
        yield Problem(severity=Severity.WARNING, code="not-in-index", where=where, message=message)
    have = sum(entry.num_bytes for entry in gather.entries().values())
    if isinstance(total, int) and total != have and not absent:
        message = f"total_size is {total}, the tensors have {have} bytes"
        yield Problem(severity=Severity.WARNING, code="wrong-total-size", where=where, message=message)


def _missing_numbers(folder: Folder, files: list[str]) -> Iterable[Problem]:
    matches = [match for file in files if not is_rank_shard(file) and (match := _NUMBERED.fullmatch(file))]
    for stem, total in sorted({(match[1], match[3]) for match in matches}):
        have = {int(match[2]) for match in matches if match[1] == stem and match[3] == total}
        if int(total) >= 1:
            message = f"{len(have)} of {int(total)} numbered files, but no {stem}.safetensors.index.json"
            where = f"{folder.prefix}{stem}.safetensors.index.json"
            yield Problem(severity=Severity.WARNING, code="missing-index", where=where, message=message)
        for number in sorted(set(range(1, int(total) + 1)) - have)[:10]:
            file = f"{stem}-{number:05}-of-{total}.safetensors"
            yield Problem(
                severity=Severity.ERROR,
                code="missing-file",
                where=folder.prefix + file,
                message="one of a numbered set, but not there",
            )
