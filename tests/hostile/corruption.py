"""The changes of the corruption sweep, and the client of the process that tries them."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.cli.tool import ROOT, environment
from tests.hostile.operations import Tree
from tests.hostile.regions import Region, regions_of

__all__ = ["Change", "Outcome", "Server", "changes", "read_tree"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done to a checkpoint.

    Attributes:
        kind: What in general: ``flip``, ``cut``, ``swap``, …
        region: Of a flip, what stood there.
        files: The files that are changed.
        text: For people.
        operations: For the server.
    """

    kind: str
    files: Sequence[str]
    text: str
    operations: Sequence[Sequence[Any]]
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of it: see ``corruption_server``."""

    parts: Mapping[str, str]
    findings: Sequence[Sequence[str]]
    raised: Sequence[Any] | None
    crash: str | None

    @property
    def faults(self) -> set[tuple[str, ...]]:
        """Errors and warnings."""
        return {(*one,) for one in self.findings if one[0] != "note"}

    @property
    def errors(self) -> set[tuple[str, ...]]:
        """Errors alone: with these, ``validate`` exits with 1."""
        return {one for one in self.faults if one[0] == "error"}

    @property
    def notes(self) -> set[str]:
        """Codes of notes."""
        return {one[1] for one in self.findings if one[0] == "note"}


@dataclass
class Server:
    """The client; ``close`` ends the process."""

    _process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.corruption_server"],
            cwd=ROOT,
            env=environment(PYTHONPATH=str(ROOT), PYTHONHASHSEED="0", TORCH_CPP_LOG_LEVEL="ERROR"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=10)

    def attempt(self, folder: Path, trials: Sequence[Change]) -> tuple[Outcome, list[Outcome]]:
        """Return what an intact folder gives, and what it gives after each change."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"folder": str(folder), "trials": [[], *(change.operations for change in trials)]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has died"
        first, *others = (Outcome(**item) for item in json.loads(answer))
        assert len(others) == len(trials)
        return first, others


def read_tree(folder: Path) -> Tree:
    """Return all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def changes(tree: Tree, *, scale: int, seed: str, older: Tree | None = None) -> list[Change]:
    """Return the changes to try, the same ones for the same seed.

    Args:
        tree: The files of a checkpoint.
        scale: How many times more than the least.
        seed: Any text.
        older: The same checkpoint of another step.
    """
    chance = random.Random(seed)
    found = [*_flips(tree, chance, scale), *_cuts(tree, chance, scale), *_file_changes(tree, chance, scale)]
    for file in tree:
        if file.endswith(".metadata"):
            found += _metadata_edits(file, tree[file], chance, scale)
    for file, content in (older or {}).items():
        if content != tree[file]:
            text = f"{file} is that of another step"
            found.append(Change(kind="older", files=[file], text=text, operations=[["write", file, _text(content)]]))
    return found


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _flips(tree: Tree, chance: random.Random, scale: int) -> Iterator[Change]:
    by_name: dict[str, list[Region]] = defaultdict(list)
    for file, content in tree.items():
        for region in regions_of(file, content):
            by_name[region.name].append(region)
    for name, regions in sorted(by_name.items()):
        weights = [region.stop - region.start for region in regions]
        for _ in range(scale * (12 if name == "metadata" else 4)):
            (region,) = chance.choices(regions, weights)
            at = chance.randrange(region.start, region.stop)
            bits = 1 << chance.randrange(8) if chance.random() < 0.7 else chance.randrange(1, 256)
            text = f"{region.file} at {at} ({name}) ^ {bits:#04x}"
            operations = [["flip", region.file, at, bits]]
            yield Change(kind="flip", region=name, files=[region.file], text=text, operations=operations)
        region = chance.choice(regions)
        size = min(region.stop - region.start, 4096)
        if any(tree[region.file][region.start : region.start + size]):
            yield Change(
                kind="flip", region=name, files=[region.file],
                text=f"{size} zeros in {region.file} at {region.start} ({name})",
                operations=[["zero", region.file, region.start, size]],
            )  # fmt: skip


def _cuts(tree: Tree, chance: random.Random, scale: int) -> Iterator[Change]:
    for file in _some(sorted(tree), chance, 4 * scale):
        size = len(tree[file])
        borders = {edge for region in regions_of(file, tree[file]) for edge in (region.start, region.stop)}
        places = {0, 1, size // 2, size - 1}
        places |= {edge + shift for edge in _some(sorted(borders), chance, 2) for shift in (-1, 0, 1)}
        for place in sorted(places & set(range(size))):
            yield Change(
                kind="cut", files=[file], text=f"{file} cut to {place} of {size}", operations=[["cut", file, place]]
            )
        for tail in (b"\0", b"garbage" * 9):
            operations = [["append", file, _text(tail)]]
            yield Change(kind="append", files=[file], text=f"{len(tail)} bytes behind {file}", operations=operations)


def _file_changes(tree: Tree, chance: random.Random, scale: int) -> Iterator[Change]:
    for file in _some(sorted(tree), chance, 10 * scale):
        yield Change(kind="delete", files=[file], text=f"{file} deleted", operations=[["delete", file]])
        yield Change(kind="cut", files=[file], text=f"{file} emptied", operations=[["cut", file, 0]])
    pairs = [
        (first, second)
        for first in sorted(tree)
        for second in sorted(tree)
        if first < second and first.rpartition(".")[2] == second.rpartition(".")[2]
    ]
    alike = [pair for pair in pairs if len(tree[pair[0]]) == len(tree[pair[1]])]
    for first, second in dict.fromkeys([*_some(pairs, chance, 3 * scale), *_some(alike, chance, 2 * scale)]):
        text = f"{first} and {second} swapped"
        yield Change(kind="swap", files=[first, second], text=text, operations=[["swap", first, second]])
        text = f"{first} copied over {second}"
        yield Change(kind="copy", files=[second, first], text=text, operations=[["copy", second, first]])
        text = f"{second} copied over {first}"
        yield Change(kind="copy", files=[first, second], text=text, operations=[["copy", first, second]])


def _some(items: Sequence[Any], chance: random.Random, number: int) -> list[Any]:
    return list(items) if len(items) <= number else sorted(chance.sample(list(items), number))


# --- edits of .metadata, as if a tool had written it


def _metadata_edits(file: str, content: bytes, chance: random.Random, scale: int) -> Iterator[Change]:
    for edit in _EDITS:
        for _ in range(scale // 2 + 1):
            metadata = pickle.loads(content)
            text = edit(metadata, chance)
            if text is None:
                continue
            out = io.BytesIO()
            pickle.dump(metadata, out)
            yield Change(
                kind="edit", files=[file], text=f"{file}: {text}",
                operations=[["write", file, _text(out.getvalue())]],
            )  # fmt: skip


_Edit = Callable[[Any, random.Random], str | None]
_EDITS: list[_Edit] = []


def _edit(function: _Edit) -> _Edit:
    _EDITS.append(function)
    return function


def _place(metadata: Any, chance: random.Random) -> Any:
    return chance.choice(list(metadata.storage_data))


def _tensors(metadata: Any) -> list[str]:
    return [key for key, item in metadata.state_dict_metadata.items() if hasattr(item, "chunks") and item.chunks]


@_edit
def _offset_shifted(metadata: Any, chance: random.Random) -> str:
    index, shift = _place(metadata, chance), chance.choice([-64, -1, 1, 4, 64, 4096])
    metadata.storage_data[index].offset += shift
    return f"offset of {index} {shift:+}"


@_edit
def _length_changed(metadata: Any, chance: random.Random) -> str:
    index, shift = _place(metadata, chance), chance.choice([-64, -1, 1, 64])
    metadata.storage_data[index].length += shift
    return f"length of {index} {shift:+}"


@_edit
def _places_swapped(metadata: Any, chance: random.Random) -> str | None:
    """Of two items that look alike, if there are any."""
    storage = metadata.storage_data
    first = _place(metadata, chance)
    others = [index for index in storage if index != first]
    alike = [index for index in others if storage[index].length == storage[first].length]
    if not others:
        return None
    second = chance.choice(alike or others)
    storage[first], storage[second] = storage[second], storage[first]
    return f"places of {first} and {second} swapped"


@_edit
def _places_swapped_anyhow(metadata: Any, chance: random.Random) -> str | None:
    storage = metadata.storage_data
    if len(storage) < 2:
        return None
    first, second = chance.sample(list(storage), 2)
    storage[first], storage[second] = storage[second], storage[first]
    return f"places of {first} and {second} swapped"


@_edit
def _place_doubled(metadata: Any, chance: random.Random) -> str | None:
    """One of two shards is read twice."""
    storage = metadata.storage_data
    first = _place(metadata, chance)
    alike = [index for index in storage if index != first and storage[index].length == storage[first].length]
    if not alike:
        return None
    second = chance.choice(alike)
    storage[first] = copy.copy(storage[second])
    return f"{first} lies where {second} does"


@_edit
def _place_dropped(metadata: Any, chance: random.Random) -> str:
    index = _place(metadata, chance)
    del metadata.storage_data[index]
    return f"no place of {index}"


@_edit
def _file_changed(metadata: Any, chance: random.Random) -> str | None:
    index = _place(metadata, chance)
    files = {info.relative_path for info in metadata.storage_data.values()}
    others = sorted(files - {metadata.storage_data[index].relative_path})
    if not others:
        return None
    metadata.storage_data[index].relative_path = chance.choice(others)
    return f"{index} lies in another file"


@_edit
def _chunk_dropped(metadata: Any, chance: random.Random) -> str | None:
    if not (keys := _tensors(metadata)):
        return None
    key = chance.choice(keys)
    metadata.state_dict_metadata[key].chunks.pop(chance.randrange(len(metadata.state_dict_metadata[key].chunks)))
    return f"a chunk of {key} dropped"


@_edit
def _chunk_moved(metadata: Any, chance: random.Random) -> str | None:
    keys = [key for key in _tensors(metadata) if metadata.state_dict_metadata[key].size]
    if not keys:
        return None
    key = chance.choice(keys)
    chunks = metadata.state_dict_metadata[key].chunks
    number, shift = chance.randrange(len(chunks)), chance.choice([-1, 1])
    offsets = [chunks[number].offsets[0] + shift, *chunks[number].offsets[1:]]
    chunks[number] = replace(chunks[number], offsets=torch.Size(map(abs, offsets)))
    return f"chunk {number} of {key} moved by {shift}"


@_edit
def _chunk_resized(metadata: Any, chance: random.Random) -> str | None:
    keys = [key for key in _tensors(metadata) if metadata.state_dict_metadata[key].size]
    if not keys:
        return None
    key = chance.choice(keys)
    chunks = metadata.state_dict_metadata[key].chunks
    number = chance.randrange(len(chunks))
    sizes = list(chunks[number].sizes)
    sizes[chance.randrange(len(sizes))] += 1
    chunks[number] = replace(chunks[number], sizes=torch.Size(sizes))
    return f"chunk {number} of {key} is larger"


@_edit
def _shape_changed(metadata: Any, chance: random.Random) -> str | None:
    keys = [key for key in _tensors(metadata) if metadata.state_dict_metadata[key].size]
    if not keys:
        return None
    key = chance.choice(keys)
    item = metadata.state_dict_metadata[key]
    sizes = list(item.size)
    sizes[chance.randrange(len(sizes))] += chance.choice([-1, 1])
    item.size = torch.Size(map(abs, sizes))
    return f"{key} has another shape"


@_edit
def _dtype_changed(metadata: Any, chance: random.Random) -> str | None:
    if not (keys := _tensors(metadata)):
        return None
    key = chance.choice(keys)
    item = metadata.state_dict_metadata[key]
    kinds = [kind for kind in (torch.float32, torch.int32, torch.bfloat16) if kind != item.properties.dtype]
    item.properties.dtype = chance.choice(kinds)
    return f"{key} has another dtype"


@_edit
def _key_dropped(metadata: Any, chance: random.Random) -> str:
    """From everything that the metadata say."""
    key = chance.choice(list(metadata.state_dict_metadata))
    del metadata.state_dict_metadata[key]
    (metadata.planner_data or {}).pop(key, None)
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        del metadata.storage_data[index]
    return f"{key} dropped"


@_edit
def _key_renamed(metadata: Any, chance: random.Random) -> str:
    """In the keys, not in the paths."""
    key = chance.choice(list(metadata.state_dict_metadata))
    new = key[:-1] + chr(ord(key[-1]) ^ 1)
    for table in (metadata.state_dict_metadata, metadata.planner_data or {}):
        if key in table:
            table[new] = table.pop(key)
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        metadata.storage_data[replace(index, fqn=new)] = metadata.storage_data.pop(index)
    return f"{key} renamed to {new}"


@_edit
def _path_changed(metadata: Any, chance: random.Random) -> str | None:
    if not metadata.planner_data:
        return None
    key = chance.choice(list(metadata.planner_data))
    path = metadata.planner_data[key]
    metadata.planner_data[key] = (*path[:-1], f"{path[-1]}x")
    return f"the path of {key} changed"


@_edit
def _paths_swapped(metadata: Any, chance: random.Random) -> str | None:
    paths = metadata.planner_data
    if not paths or len(paths) < 2:
        return None
    first, second = chance.sample(list(paths), 2)
    paths[first], paths[second] = paths[second], paths[first]
    return f"the paths of {first} and {second} swapped"


@_edit
def _path_dropped(metadata: Any, chance: random.Random) -> str | None:
    if not metadata.planner_data:
        return None
    key = chance.choice(list(metadata.planner_data))
    del metadata.planner_data[key]
    return f"the path of {key} dropped"
