"""``fsdp_ckpt.json``: the last file of every checkpoint that we save, and the sign that it is whole.

It says what was saved, by how many ranks, lists every other file with its size and CRC-32, and has a checksum of its
own. A folder with such a manifest is complete when all of these files are there with these sizes; saving writes into a
hidden sibling, so that the manifest never stands in a folder that is not.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsdp_ckpt.catalog import Problem, Severity
from fsdp_ckpt.codec.stamp import STAMP_BYTES, read_stamp
from fsdp_ckpt.errors import MalformedFile, PathOutside
from fsdp_ckpt.layouts.elsewhere import note_elsewhere, of_rank, rank_of
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirrors import mirror_of

__all__ = [
    "MANIFEST", "Manifest", "Member", "check_files", "check_stamps", "manifest_of", "ranks_elsewhere",
    "read_manifest", "write_manifest",
]  # fmt: skip

MANIFEST = "fsdp_ckpt.json"
_FORMAT = "fsdp-ckpt/checkpoint/2"
_FORMATS = ("fsdp-ckpt/checkpoint/1", _FORMAT)
"""The first one had no checksum of its own."""
_LIMIT_BYTES = 256 << 20
_READS_AT_ONCE = 16
_PART_FOLDERS = ("pytorch_model", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A model, optimizer, scheduler, data loader or object of a checkpoint.

    Attributes:
        name: As the caller named it; its number where it was one of a list.
        part: Its folder or file, without ending (``pytorch_model_fsdp_0``).
        kind: Its class, or how it was sharded (``FSDP2``, ``AdamW``).
        of: For an optimizer: names of the models whose parameters it holds.
        facts: Mesh, sharding strategy, and the like.
    """

    name: str
    part: str
    kind: str = ""
    of: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        save_id: Random; the same for all files of one save.
        step: Training step; None when none was given.
        world_size: Ranks that saved it.
        state_dict_type: ``SHARDED_STATE_DICT``, ``FULL_STATE_DICT`` or ``LOCAL_STATE_DICT``.
        created: When, in UTC, ISO 8601.
        versions: Of fsdp-ckpt, torch and Python.
        models: In order.
        optimizers: In order.
        schedulers: In order.
        dataloaders: In order.
        objects: In order.
        has_rng: Whether random states were saved.
        values: Numbers and texts of the caller.
        files: Size in bytes and CRC-32 (eight hexadecimal digits) by path.
    """

    save_id: str
    step: int | None
    world_size: int
    state_dict_type: str
    created: str
    versions: Mapping[str, str]
    models: Sequence[Member] = ()
    optimizers: Sequence[Member] = ()
    schedulers: Sequence[Member] = ()
    dataloaders: Sequence[Member] = ()
    objects: Sequence[Member] = ()
    has_rng: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)


_MEMBERS = ("models", "optimizers", "schedulers", "dataloaders", "objects")


def write_manifest(manifest: Manifest) -> bytes:
    """Return the file's content.

    Raises:
        ValueError: A value of the caller is nothing that JSON has.
        TypeError: The same.
    """
    fields = asdict(manifest)
    files = {path: {"bytes": size, "crc32": crc} for path, (size, crc) in sorted(fields.pop("files").items())}
    data = {"format": _FORMAT, **fields, "files": files}
    data["crc32"] = _checksum(json.loads(json.dumps(data)))
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def read_manifest(folder: Folder) -> Manifest | None:
    """Return the manifest of a folder, None when it has none.

    Raises:
        MalformedFile: It is broken, or of a version that we do not know.
    """
    if MANIFEST not in folder.files:
        return None
    where = folder.prefix + MANIFEST
    try:
        data = json.loads(folder.store.read(where, limit_bytes=_LIMIT_BYTES))
        if data["format"] not in _FORMATS:
            raise MalformedFile(f"{where}: format {data['format']!r:.60}, this version reads {_FORMAT}")
        recorded = data.pop("crc32", None)
        if (recorded, data["format"]) != (None, _FORMATS[0]) and recorded != _checksum(data):
            raise MalformedFile(f"{where}: damaged: its own checksum is not the recorded one")
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, MalformedFile):
            raise
        raise MalformedFile(f"{where}: broken: {type(error).__name__}: {error}") from None


def _checksum(data: Mapping[str, Any]) -> str:
    """Return the CRC-32 of what a manifest says, whatever its spaces and the order of its fields."""
    return f"{zlib.crc32(json.dumps(data, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _parse(data: Mapping[str, Any]) -> Manifest:
    step, world_size = data["step"], data["world_size"]
    if type(world_size) is not int or world_size < 1 or not (step is None or type(step) is int):
        raise ValueError("an impossible step or world size")
    files = {}
    for path, entry in data["files"].items():
        size, crc = entry["bytes"], entry["crc32"]
        if type(size) is not int or size < 0:
            raise ValueError(f"an impossible size of {path}")
        int(crc, 16)
        files[path] = (size, crc)
    fields: dict[str, Any] = {name: [_member(entry) for entry in data[name]] for name in _MEMBERS}
    fields |= {name: str(data[name]) for name in ("save_id", "state_dict_type", "created")}
    return Manifest(
        step=step,
        world_size=world_size,
        versions={str(name): str(version) for name, version in data["versions"].items()},
        has_rng=data["has_rng"] is True,
        values=dict(data["values"]),
        files=files,
        **fields,
    )


def _member(entry: Mapping[str, Any]) -> Member:
    return Member(
        name=str(entry["name"]),
        part=str(entry["part"]),
        kind=str(entry["kind"]),
        of=[str(name) for name in entry["of"]],
        facts=dict(entry["facts"]),
    )


def check_files(folder: Folder, manifest: Manifest) -> list[Problem]:
    """Compare what lies in a folder with its manifest: names and sizes, no content."""
    found = []
    for path, (size, _) in manifest.files.items():
        have = folder.store.size(folder.prefix + path)
        if have is None:
            message = f"listed in the manifest, but not there{of_rank(path)}"
            found.append(_problem("missing-file", folder, path, message))
        elif have != size:
            message = f"has {have} bytes, the manifest says {size}"
            found.append(_problem("wrong-size", folder, path, message))
    return found


def manifest_of(store: LocalStore) -> Manifest | None:
    """Return the manifest of a checkpoint; of a part's folder, that of the checkpoint above, with the part's files.

    Raises:
        MalformedFile: It is broken.
    """
    manifest, name = read_manifest(Folder(store)), store.root.resolve().name
    if manifest is not None or not name.startswith(_PART_FOLDERS):
        return manifest
    above = read_manifest(Folder(LocalStore([root.resolve().parent for root in store.roots])))
    if above is None:
        return None
    prefix = f"{name}/"
    files = {path.removeprefix(prefix): facts for path, facts in above.files.items() if path.startswith(prefix)}
    return replace(above, files=files)


def check_stamps(folder: Folder, manifest: Manifest | None, files: Iterable[str] = ()) -> Iterator[Problem]:
    """Look at the first bytes of each data file: whether they are of this save, and of the rank that the name says.

    Files that are not there are left to ``check_files``. Files without a stamp, as others write them, are taken as they
    are.

    Args:
        folder: The checkpoint, or one part of it.
        manifest: Its manifest; None where there is none, as after a loss: then all files have to be of one save.
        files: Data files, where there is no manifest.
    """
    save_id = manifest.save_id if manifest is not None else None
    paths = [path for path in (manifest.files if manifest is not None else files) if path.endswith(".distcp")]
    for path, stamp in zip(paths, _stamps(folder, paths), strict=False):
        if stamp is None:
            continue
        save_id = save_id or stamp[0]
        if stamp[0] != save_id:
            whose = "the manifest is" if manifest is not None else "others are"
            yield _problem("mixed-saves", folder, path, f"is of another save ({stamp[0]}), {whose} of {save_id}")
        elif stamp[1] != rank_of(path):
            message = f"rank {stamp[1]} saved it, its name says rank {rank_of(path)}"
            yield _problem("misplaced-file", folder, path, message)


def _stamps(folder: Folder, paths: Sequence[str]) -> Iterator[tuple[str, int] | None]:
    """Yield the stamp of each file, None where it has none; of files that are far away several are read at a time."""

    def look(path: str) -> tuple[str, int] | None:
        try:
            size = folder.store.size(folder.prefix + path)
        except PathOutside:  # readers say so
            return None
        if size is None or size < STAMP_BYTES:
            return None
        return read_stamp(folder.store.reader(folder.prefix + path)(0, STAMP_BYTES))

    if len(paths) > 1 and mirror_of(folder.store.root) is not None:
        with ThreadPoolExecutor(_READS_AT_ONCE, "fsdp-ckpt-stamps") as pool:
            yield from pool.map(look, paths)
    else:
        yield from map(look, paths)


def ranks_elsewhere(folder: Folder, manifest: Manifest) -> Iterator[Problem]:
    """Say which ranks' files, of those in the manifest, are all missing."""
    sizes = {path: folder.store.size(folder.prefix + path) for path in manifest.files}
    missing = [rank_of(path) for path, have in sizes.items() if have is None]
    return note_elsewhere(folder, missing, (rank_of(path) for path, have in sizes.items() if have is not None))


def _problem(code: str, folder: Folder, path: str, message: str) -> Problem:
    return Problem(severity=Severity.ERROR, code=code, where=folder.prefix + path, message=message)
