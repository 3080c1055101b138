"""The index of numbered safetensors files, ``model.safetensors.index.json``, from the headers of the files."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from fsdp_ckpt.codec.safetensors import Header, read_header
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.layouts.hf import is_rank_shard
from fsdp_ckpt.ops.repairs.actions import Kind
from fsdp_ckpt.ops.repairs.look import Look
from fsdp_ckpt.store.local import Folder

__all__ = ["mend_indexes"]

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_LIMIT_BYTES = 256 << 20


def mend_indexes(look: Look, folder: Folder) -> None:
    """Plan to make, or make anew, the index of each set of numbered files in a folder."""
    sets: dict[str, dict[int, list[str]]] = {}
    for file in folder.files:
        match = _NUMBERED.fullmatch(file)
        if match is not None and not is_rank_shard(file):
            sets.setdefault(match[1], {}).setdefault(int(match[3]), []).append(file)
    for stem, by_total in sets.items():
        name = f"{stem}.safetensors.index.json"
        index, broken = _read(folder, name)
        if len(by_total) > 1:  # files of two saves: only an index that is right can tell
            if _contradiction(folder, index, broken):
                totals = " and ".join(f"-of-{total:05}" for total in sorted(by_total))
                look.findings.fault(folder.prefix + name, f"cannot be made: there are files of two saves, {totals}")
            continue
        ((total, files),) = by_total.items()
        _mend(look, folder, _Set(name=name, stem=stem, files=files, total=total, index=index, broken=broken))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """Numbered files, and their index: what it says, or why it is of no use."""

    name: str
    stem: str
    files: list[str]
    total: int
    index: dict[str, Any] | None
    broken: str


def _mend(look: Look, folder: Folder, found: _Set) -> None:
    where, findings = folder.prefix + found.name, look.findings
    files, total, index, broken = found.files, found.total, found.index, found.broken
    wanted = {f"{found.stem}-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)}
    missing = sorted(wanted - set(files))
    if missing:
        if index is None:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            why = f"{broken}, and cannot be made: {missing[0]}{more} of {total} files {'are' if more else 'is'} missing"
            findings.fault(where, why, f"copy it from where {shlex.quote(look.shown)} came from")
        return
    headers: dict[str, Header] = {}
    for file in sorted(files):
        path = folder.prefix + file
        try:
            headers[file] = read_header(folder.store.reader(path), 0, folder.files[file], where=path)
        except FsdpCkptError:  # told of where damaged files are looked for
            return
    weight_map: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in weight_map:
                text = f"cannot be made: `{tensor.name}` stands in {weight_map[tensor.name]} and in {file}"
                if _contradiction(folder, index, broken):
                    findings.fault(where, text)
                return
            weight_map[tensor.name] = file
    total_bytes = sum(tensor.stop - tensor.start for header in headers.values() for tensor in header.tensors)
    why = _wrong(index, broken, weight_map)
    if not why:
        if index is not None:
            _compare_total(look, where, index, total_bytes)
        return
    lost = sorted(set(index["weight_map"]) - weight_map.keys()) if index is not None else []
    if lost:
        text = f"lists `{lost[0]}` and {len(lost) - 1} more tensors" if len(lost) > 1 else f"lists `{lost[0]}`"
        findings.fault(where, f"{text}, which no file holds: a file was replaced or lost; the index stays as it is")
        return
    metadata = dict(index.get("metadata") or {}) if index is not None else {}
    content = {"metadata": metadata | {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    data = (json.dumps(content, indent=2) + "\n").encode()
    findings.write(Kind.REBUILD_INDEX, where, data, why, source=f"the headers of {total} files")


def _read(folder: Folder, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return an index, or None and why it is of no use."""
    if name not in folder.files:
        return None, "missing: transformers cannot load numbered files without it"
    try:
        index = json.loads(folder.store.read(folder.prefix + name, limit_bytes=_LIMIT_BYTES))
        pairs = [*index["weight_map"].items(), *(index.get("metadata") or {}).items()]
    except (FsdpCkptError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return None, f"broken: {type(error).__name__}: {error}"
    if not all(isinstance(key, str) for key, _ in pairs) or not all(
        isinstance(f, str) for f in index["weight_map"].values()
    ):
        return None, "broken: names that are no texts"
    return index, ""


def _contradiction(folder: Folder, index: dict[str, Any] | None, broken: str) -> str:
    """Return why an index is of no use, as far as names of files tell; empty when it may be right."""
    if index is None:
        return broken
    return "lists files that are not there" if set(index["weight_map"].values()) - set(folder.files) else ""


def _wrong(index: dict[str, Any] | None, broken: str, weight_map: dict[str, str]) -> str:
    """Return what is wrong with an index; empty when it is right."""
    if index is None:
        return broken
    said = index["weight_map"]
    other = sorted(key for key in said.keys() & weight_map.keys() if said[key] != weight_map[key])
    if other:
        return f"says that {len(other)} tensors stand in other files, first `{other[0]}`"
    unlisted = sorted(weight_map.keys() - said.keys())
    if unlisted:
        return f"does not list {len(unlisted)} tensors, first `{unlisted[0]}`"
    if said.keys() - weight_map.keys():
        return "lists tensors that no file holds"
    return ""


def _compare_total(look: Look, where: str, index: dict[str, Any], total_bytes: int) -> None:
    """Tell of a wrong sum, which no reader goes by: some tools count tied tensors twice, or other dtypes."""
    total = (index.get("metadata") or {}).get("total_size")
    if total is not None and total != total_bytes:
        look.findings.note(f"{where}: total_size is {total!s:.40}, the tensors have {total_bytes} bytes")
