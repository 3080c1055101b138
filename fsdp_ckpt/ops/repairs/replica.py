"""Files from another copy of the same checkpoint, once it is certain that it is one, and that the file in it is whole.

With our manifest that is plain: size and CRC-32 of every file are known. Otherwise the two have to agree wherever
both can be read: in every byte of ``.metadata``, which says which save it was, and of safetensors; in what the
directories of archives say of their records; in the stamps of our data files; in what JSON files say. A copy of another
step differs in these. Numbered files of a model may not, as some of it may be frozen, nor arguments and the like: they
contradict, but prove nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_ckpt.codec.dcp_metadata_facts import read_facts
from fsdp_ckpt.codec.safetensors import read_header
from fsdp_ckpt.codec.stamp import STAMP_BYTES, read_stamp
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, MalformedFile
from fsdp_ckpt.layouts.composite import step_of
from fsdp_ckpt.layouts.elsewhere import rank_of
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.ops.repairs.actions import Kind, Patch
from fsdp_ckpt.ops.repairs.look import Look, real_folders
from fsdp_ckpt.ops.repairs.records import check_records, is_zip, table
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.local import Folder, LocalStore

__all__ = ["Extents", "Refusal", "restore_file"]

Extents = dict[str, set[tuple[int, int]]]
"""Where archives lie, by file."""

_ARCHIVES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NUMBERED = re.compile(r".*-\d{5}-of-\d{5}\.\w+")
_CONSTANT = re.compile(r".*(args|config|tokeni[sz]|vocab|processor).*", re.IGNORECASE)
"""What a run writes into every checkpoint alike."""
_STATE = re.compile(r".*(optim|rng|random|scheduler).*", re.IGNORECASE)
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a file is not taken.

    Attributes:
        why: For people.
        is_open: Nothing speaks against the copy, only for it there is too little: people may know more.
    """

    why: str
    is_open: bool = False


def restore_file(look: Look, file: str, why: str, extents: Extents) -> Refusal | None:
    """Plan to take a file from the other copy.

    Args:
        look: The look at the checkpoint; ``replica`` is set.
        file: What is damaged or missing.
        why: What is wrong with it.
        extents: Where archives lie in the files of the checkpoint.

    Returns:
        Why it cannot be taken; None when it can.
    """
    assert look.replica is not None
    store = LocalStore(look.replica)
    try:
        size = store.size(file)
        if size is None:
            return Refusal(why=f"`{look.replica}` has no {file}")
        listed = look.manifest.files.get(file) if look.manifest is not None else None
        crc: int | None = None
        if listed is not None:
            crc = int(listed[1], 16)
            with store.opened(file) as source:
                if size != listed[0] or checksum_range(source, 0, size) != crc:
                    return Refusal(why=f"the {file} of `{look.replica}` is not what the manifest lists, either")
        else:
            refusal = _doubt(look, store, file, extents)
            if refusal is not None:
                return refusal
        content = Patch(base=Path(store.path(file)), size=size)
        look.findings.write(Kind.RESTORE_BOX, file, content, why, source=str(look.replica / file), crc32=crc)
    except FsdpCkptError as error:
        return Refusal(why=error.message)
    except OSError as error:
        return Refusal(why=f"`{look.replica}` cannot be read: {error.strerror}")
    finally:
        store.close()
    return None


def _doubt(look: Look, store: LocalStore, file: str, extents: Extents) -> Refusal | None:
    """Return why it is not certain that a file of the other copy is whole and of the same save; None when it is."""
    open_question: Refusal | None = None
    try:
        _check_whole(store, file, extents)
    except NoChecksums as error:
        open_question = Refusal(why=error.message, is_open=True)
    except CorruptCheckpoint as error:
        return Refusal(why=f"the copy is damaged, too: {error.message}")
    assert look.replica is not None
    if look.replica not in look.doubts:
        try:
            look.doubts[look.replica] = _doubt_save(look, store, extents)
        except FsdpCkptError as error:
            look.doubts[look.replica] = Refusal(why=error.message)
    return look.doubts[look.replica] or _doubt_stamp(look, store, file) or open_question


def _doubt_stamp(look: Look, store: LocalStore, file: str) -> Refusal | None:
    """Return why a data file of ours is of another save or rank; files without a stamp say nothing."""
    stamp = _stamp(store, file)
    if stamp is None:
        return None
    if rank_of(file) not in (None, stamp[1]):
        return Refusal(why=f"the {file} of `{look.replica}` is of rank {stamp[1]}: it is in the wrong place there")
    if not look.saves:
        for name in _files(look):
            mine = _stamp(look.root.store, name)
            if mine is not None:
                look.saves.setdefault(mine[0], []).append(name)
    names = (name for save, found in look.saves.items() if save != stamp[0] for name in found)
    other = next((name for name in names if name != file), None)
    if other is not None:
        return Refusal(why=f"the {file} of `{look.replica}` is of another save than {other} here")
    return None


def _stamp(store: LocalStore, file: str) -> tuple[str, int] | None:
    if not file.endswith(".distcp") or (store.size(file) or 0) < STAMP_BYTES:
        return None
    try:
        return read_stamp(store.reader(file)(0, STAMP_BYTES))
    except OSError:  # a bad sector
        return None


def _doubt_save(look: Look, store: LocalStore, extents: Extents) -> Refusal | None:
    """Return why it is not certain that the other copy is of the same save; None when it is."""
    assert look.replica is not None
    evidence = 0
    for other in _files(look):
        if store.size(other) is None:
            continue
        found = _agree(look, store, other, extents)
        if found is False:
            return Refusal(why=f"`{look.replica}` is not of the same save: {other} differs")
        evidence += bool(found)
    steps = step_of(look.root), step_of(Folder(store))
    if None not in steps and steps[0] != steps[1]:
        return Refusal(why=f"`{look.replica}` is of step {steps[1]} by its name, this one of step {steps[0]}")
    if evidence:
        return None
    why = f"nothing here tells whether `{look.replica}` is of the same save"
    return Refusal(why=f"{why}: what is in both may be the same in every step", is_open=True)


def _files(look: Look) -> Iterator[str]:
    for folder in real_folders(look.root):
        yield from (folder.prefix + name for name in folder.files)


def _agree(look: Look, store: LocalStore, file: str, extents: Extents) -> bool | None:
    """Tell whether two copies of a file agree in what identifies a save; None where it has nothing of the kind."""
    mine = look.root.store
    name = file.rpartition("/")[2]
    size, other_size = mine.size(file), store.size(file)
    if name.endswith(".metadata"):
        data = mine.read(file, limit_bytes=1 << 40)
        if size != other_size or data != store.read(file, limit_bytes=1 << 40):
            return False
        return True if read_facts(data, where=file).save_id is not None else None
    if name.endswith(".json"):
        return _agree_in_json(mine, store, file)
    if name.endswith(".safetensors"):
        return _agree_in_bytes(look, store, file)
    stamps = _stamp(mine, file), _stamp(store, file)
    if stamps[0] is not None and stamps[1] is not None and stamps[0][0] != stamps[1][0]:
        return False
    agreed = True if stamps[0] is not None and stamps[0] == stamps[1] else None
    for start, stop in _places(store, file, extents):
        if size is None or stop > size:  # cut off
            continue
        tables = [table(one.reader(file), start, stop, where=file) for one in (mine, store)]
        if None in tables:
            continue
        if tables[0] != tables[1]:
            return False
        if not _NUMBERED.fullmatch(name) and not _CONSTANT.fullmatch(name):
            agreed = True
    return agreed


def _agree_in_json(mine: LocalStore, store: LocalStore, file: str) -> bool | None:
    """Compare what JSON files say: which step, which names, which configuration."""
    both = []
    for one in (mine, store):
        try:
            both.append(json.loads(one.read(file, limit_bytes=_LIMIT_BYTES)))
        except (ValueError, RecursionError):
            return None
    name = file.rpartition("/")[2]
    if name == MANIFEST:
        both = [value.get("save_id") if isinstance(value, dict) else None for value in both]
    elif name.endswith(".index.json"):
        both = [value.get("weight_map") if isinstance(value, dict) else None for value in both]
    if None in both:
        return None
    if both[0] != both[1]:
        return False
    knows_step = name == "trainer_state.json" and isinstance(both[0], dict) and "global_step" in both[0]
    return True if name == MANIFEST or knows_step else None


def _agree_in_bytes(look: Look, store: LocalStore, file: str) -> bool | None:
    """Compare safetensors, which carry no checksums; one that cannot be read here has nothing to say."""
    mine = look.root.store
    size = mine.size(file) or 0
    try:
        read_header(mine.reader(file), 0, size, where=file)
    except CorruptCheckpoint:
        return None
    if size != store.size(file):
        return False
    with mine.opened(file) as a, store.opened(file) as b:
        if checksum_range(a, 0, size) != checksum_range(b, 0, size):
            return False
    return True if _STATE.fullmatch(file.rpartition("/")[2]) else None


class NoChecksums(MalformedFile):
    """Nothing in a file tells whether it is whole."""


def _check_whole(store: LocalStore, file: str, extents: Extents) -> None:
    """Check all that a file says of itself.

    Raises:
        NoChecksums: It says nothing of itself.
        MalformedFile: It is broken.
        ChecksumMismatch: A record is damaged.
    """
    size = store.size(file) or 0
    if file.endswith(".safetensors"):
        read_header(store.reader(file), 0, size, where=file)
        return
    places = _places(store, file, extents)
    if not places:
        raise NoChecksums(f"{file} of the other copy carries no checksums")
    for start, stop in sorted(places):
        check_records(store, file, start, stop, what=f"item at {start}")


def _places(store: LocalStore, file: str, extents: Extents) -> set[tuple[int, int]]:
    size = store.size(file) or 0
    if file.endswith(_ARCHIVES):
        return {(0, size)} if is_zip(store.reader(file), 0, size) else set()
    return extents.get(file, set())
