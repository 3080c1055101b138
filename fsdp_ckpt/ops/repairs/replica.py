"""Files from another copy of the same checkpoint, once it is certain that it is one, and that the file in it is whole.

With our manifest that is plain: size and CRC-32 of every file are known. Otherwise the two have to agree wherever
both can be read: in every byte of ``.metadata``, which says which save it was, and of safetensors; in what the
directories of archives say of their records. A copy of another step differs in these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fsdp_ckpt.codec.dcp_metadata_facts import read_facts
from fsdp_ckpt.codec.safetensors import read_header
from fsdp_ckpt.errors import CorruptCheckpoint, FsdpCkptError, MalformedFile
from fsdp_ckpt.ops.repairs.actions import Kind, Patch
from fsdp_ckpt.ops.repairs.look import Look, real_folders
from fsdp_ckpt.ops.repairs.records import check_records, is_zip, table
from fsdp_ckpt.run.checksum import checksum_range
from fsdp_ckpt.store.local import LocalStore

__all__ = ["Extents", "restore_file"]

Extents = dict[str, set[tuple[int, int]]]
"""Where archives lie, by file."""

_ARCHIVES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def restore_file(look: Look, file: str, why: str, extents: Extents) -> str | None:
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
            return f"`{look.replica}` has no {file}"
        listed = look.manifest.files.get(file) if look.manifest is not None else None
        crc: int | None = None
        if listed is not None:
            crc = int(listed[1], 16)
            with store.descriptor(file) as fd:
                if size != listed[0] or checksum_range(fd, 0, size) != crc:
                    return f"the {file} of `{look.replica}` is not what the manifest lists, either"
        else:
            refusal = _doubt(look, store, file, extents)
            if refusal is not None:
                return refusal
        content = Patch(base=Path(store.path(file)), size=size)
        look.findings.write(Kind.RESTORE_BOX, file, content, why, source=str(look.replica / file), crc32=crc)
    except FsdpCkptError as error:
        return error.message
    except OSError as error:
        return f"`{look.replica}` cannot be read: {error.strerror}"
    finally:
        store.close()
    return None


def _doubt(look: Look, store: LocalStore, file: str, extents: Extents) -> str | None:
    """Return why it is not certain that a file of the other copy is whole and of the same save; None when it is."""
    try:
        _check_whole(store, file, extents)
    except CorruptCheckpoint as error:
        return f"the copy is damaged, too: {error.message}"
    assert look.replica is not None
    if look.replica not in look.doubts:
        look.doubts[look.replica] = _doubt_save(look, store, extents)
    return look.doubts[look.replica]


def _doubt_save(look: Look, store: LocalStore, extents: Extents) -> str | None:
    """Return why it is not certain that the other copy is of the same save; None when it is."""
    evidence = 0
    for other in _files(look):
        if store.size(other) is None:
            continue
        found = _agree(look, store, other, extents)
        if found is False:
            return f"`{look.replica}` is not of the same save: {other} differs"
        evidence += bool(found)
    return None if evidence else f"nothing here tells whether `{look.replica}` is of the same save"


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
    if name.endswith(".safetensors"):
        return _agree_in_bytes(look, store, file)
    places = _places(store, file, extents)
    agreed: bool | None = None
    for start, stop in places:
        if size is None or stop > size:  # cut off
            continue
        tables = [table(one.reader(file), start, stop, where=file) for one in (mine, store)]
        if None in tables:
            continue
        if tables[0] != tables[1]:
            return False
        agreed = True
    return agreed


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
    with mine.descriptor(file) as a, store.descriptor(file) as b:
        return checksum_range(a, 0, size) == checksum_range(b, 0, size)


def _check_whole(store: LocalStore, file: str, extents: Extents) -> None:
    """Check all that a file says of itself.

    Raises:
        MalformedFile: It is broken, or says nothing of itself.
        ChecksumMismatch: A record is damaged.
    """
    size = store.size(file) or 0
    if file.endswith(".safetensors"):
        read_header(store.reader(file), 0, size, where=file)
        return
    places = _places(store, file, extents)
    if not places:
        raise MalformedFile(f"{file} carries no checksums")
    for start, stop in sorted(places):
        check_records(store, file, start, stop, what=f"item at {start}")


def _places(store: LocalStore, file: str, extents: Extents) -> set[tuple[int, int]]:
    size = store.size(file) or 0
    if file.endswith(_ARCHIVES):
        return {(0, size)} if is_zip(store.reader(file), 0, size) else set()
    return extents.get(file, set())
