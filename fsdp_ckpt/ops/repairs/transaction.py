"""Change files of a checkpoint so that at no moment less of it can be read than before, and all of it can be undone.

New files are written under another name and made durable first. Then each old one gets a second name in the backup,
a hidden folder of the checkpoint, and the new one takes its name in one step. Of our manifest, which lists sizes and
checksums, there is none from the first change to the last: without it a checkpoint is judged by its own rules, with
one that does not fit it would be taken for damaged. Before it goes, the one that is to come stands in the backup: a
repair that was killed in between is finished by the next one, which knows of every file what it was and what it was to
become.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_ckpt.errors import ChecksumMismatch, CorruptCheckpoint, NotEnoughSpace, UsageError
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from fsdp_ckpt.ops.repairs.actions import Step
from fsdp_ckpt.ops.repairs.fill import Filled, fill
from fsdp_ckpt.store.leftovers import BACKUP, backup_number, is_backup
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.syscalls import fsync_folder
from fsdp_ckpt.units import format_size

__all__ = ["OWED", "PREVIOUS", "Backup", "apply_steps", "forget_owed", "relisted"]

OWED = f".new/{MANIFEST}"
"""In a backup: the manifest that is to come. Without one in its place the repair was killed."""
PREVIOUS = f".was/{MANIFEST}"
"""In a backup: the manifest that was in its place."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EACCES, errno.EXDEV)


def relisted(manifest: Manifest, written: Mapping[str, tuple[int, int]], dropped: Sequence[str]) -> Manifest | None:
    """Return a manifest that lists files as they are to be; None where it does so already.

    Args:
        manifest: As it is.
        written: Size and CRC-32 of what is written.
        dropped: Files that go.
    """
    files = {file: entry for file, entry in manifest.files.items() if file not in dropped}
    files |= {file: (size, f"{crc:08x}") for file, (size, crc) in written.items()}
    same = files.keys() == manifest.files.keys() and all(
        (size, int(crc, 16)) == (manifest.files[file][0], int(manifest.files[file][1], 16))
        for file, (size, crc) in files.items()
    )
    return None if same else replace(manifest, files=files)


@dataclass(slots=True)
class Backup:
    """What a repair has replaced or set aside.

    Attributes:
        root: The checkpoint, links resolved.
        path: The folder; None until something is put into it.
        kept: Files in it.
        added: Files that were not there before.
        folders: Folders that were not there before, outer ones first.
        notes: What could not be done just so.
    """

    root: Path
    path: Path | None = None
    kept: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def make_folder(self, file: str) -> None:
        """Make the folder of a file that is to be written, where there is none."""
        missing = [folder for folder in (self.root / file).parents if not folder.exists()]
        for folder in reversed(missing):
            _make(folder)
            self.folders.append(str(folder.relative_to(self.root)))

    def place(self, file: str) -> Path:
        """Return where a file goes, with the folders made that it needs."""
        if self.path is None:
            self.forget_unused()
            last = max((backup_number(name) or 0 for name in os.listdir(self.root)), default=0)
            self.path = self.root / f"{BACKUP}{last + 1}"
            _make(self.path)
        target = self.path / file
        missing = [folder for folder in target.parents if not folder.exists()]
        for folder in reversed(missing):
            _make(folder)
        fsync_folder(self.root)
        return target

    def link(self, file: str) -> None:
        """Keep a file that is about to be replaced, under a second name, or as a copy where there are no links."""
        if file in self.kept or file in self.added:
            return
        source = self.root / file
        if not os.path.lexists(source):
            self.added.append(file)
            return
        target = self.place(file)
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copy2(source, target, follow_symlinks=False)
            with open(target, "rb") as copy:
                os.fsync(copy.fileno())
        fsync_folder(target.parent)
        self.kept.append(file)

    def move(self, file: str) -> None:
        """Move a file here; one that this repair has made is removed."""
        if file in self.added:
            (self.root / file).unlink()
            self.added.remove(file)
            return
        if file in self.kept:
            (self.root / file).unlink()
            return
        target = self.place(file)
        os.rename(self.root / file, target)
        fsync_folder(target.parent)
        fsync_folder((self.root / file).parent)
        self.kept.append(file)

    def announce(self, manifest: bytes) -> None:
        """Write down what the files are to be, for the case that this repair is killed."""
        for name, content in ((PREVIOUS, (self.root / MANIFEST).read_bytes()), (OWED, manifest)):
            target = self.place(name)
            path = fill(target, content).path
            try:
                os.replace(path, target)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            fsync_folder(target.parent)

    def forget_unused(self) -> None:
        """Remove backups of repairs that were killed before they replaced anything: second names of what is there."""
        for name in sorted(os.listdir(self.root)):
            folder = self.root / name
            if not is_backup(name) or folder.is_symlink() or not folder.is_dir():
                continue
            files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
            if all(_is_same_file(path, self.root / path.relative_to(folder)) for path in files):
                shutil.rmtree(folder)


def _make(folder: Path) -> None:
    """Make a folder; root makes it for the owner of the one above."""
    folder.mkdir()
    if os.geteuid() == 0:
        above = folder.parent.stat()
        with suppress(OSError):
            os.chown(folder, above.st_uid, above.st_gid)
    fsync_folder(folder.parent)


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samestat(first.lstat(), second.lstat())
    except OSError:
        return False


def forget_owed(root: Path) -> None:
    """Remove what killed repairs wrote down in their backups, where the manifest is in its place.

    It is for repairs that were killed before they changed anything, or after they had changed everything.
    """
    try:
        if read_manifest(Folder(LocalStore(root))) is None:
            return
    except CorruptCheckpoint:
        return
    for name in os.listdir(root):
        if is_backup(name) and not (root / name).is_symlink():
            for owed in (OWED, PREVIOUS):
                with suppress(FileNotFoundError):
                    (root / name / owed).unlink()
                    (root / name / owed).parent.rmdir()


def apply_steps(steps: Sequence[Step], backup: Backup, manifest: Manifest | None) -> None:
    """Carry out steps that write or set aside files of a checkpoint.

    Args:
        steps: What to do.
        backup: Where to keep what is replaced.
        manifest: Ours, where the checkpoint has one; it is written anew when it would not fit any more.

    Raises:
        NotEnoughSpace: Found before anything is written.
        ChecksumMismatch: What was written is not what it should be; nothing was replaced.
        UsageError: A folder cannot be written to, found before anything is written.
        OSError: The disk fails.
    """
    root = backup.root
    writes = [step for step in steps if step.content is not None]
    drops = [step.action.file for step in steps if step.drop]
    owed = [file for file in drops if is_backup(file.partition("/")[0])]  # needed until the manifest is there
    drops = [file for file in drops if file not in owed]
    _check_folders(root, [step.action.file for step in steps])
    _check_space(root, sum(step.action.num_bytes for step in writes))
    ready: dict[str, Path] = {}
    try:
        written: dict[str, tuple[int, int]] = {}
        for step in writes:
            file = step.action.file
            backup.make_folder(file)
            filled = _write(root / file, step)
            ready[file] = filled.path
            written[file] = step.action.num_bytes, filled.crc32
            if filled.owner:
                backup.notes.append(f"{file} {filled.owner}")
        fresh = relisted(manifest, written, drops) if manifest is not None else None
        data = b"" if fresh is None else write_manifest(fresh)
        if fresh is not None:
            ready[MANIFEST] = fill(root / MANIFEST, data).path
            backup.link(MANIFEST)
        for file in ready:
            backup.link(file)
        if fresh is not None and (root / MANIFEST).exists():
            backup.announce(data)
            (root / MANIFEST).unlink()
            fsync_folder(root)
        for file in sorted(ready, key=lambda file: file == MANIFEST):
            if file == MANIFEST:
                _drop(drops, backup)
            os.replace(ready[file], root / file)
            del ready[file]
            fsync_folder((root / file).parent)
        _drop(drops, backup)
        _drop(owed, backup)
        forget_owed(root)
    except BaseException:
        for path in ready.values():
            path.unlink(missing_ok=True)
        if backup.path is not None:
            forget_owed(root)
            backup.forget_unused()
        raise


def _drop(files: list[str], backup: Backup) -> None:
    while files:
        backup.move(files[0])
        del files[0]


def _check_folders(root: Path, files: Sequence[str]) -> None:
    """Make sure that every folder in which something changes can be written to."""
    for folder in dict.fromkeys((root, *((root / file).parent for file in files))):
        there = next(above for above in (folder, *folder.parents) if above.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            raise UsageError(
                f"`{there}` cannot be written to: none of its files was changed",
                hint=f"ls -ld {shlex.quote(str(there))}",
            )


def _check_space(root: Path, needed_bytes: int) -> None:
    try:
        status = os.statvfs(root)
    except OSError:
        return
    free = status.f_bavail * status.f_frsize
    if needed_bytes > free:
        raise NotEnoughSpace(
            f"the repair needs {format_size(needed_bytes)} beside what it replaces, {format_size(free)} are free at "
            f"`{root}`",
            hint="make room, or repair one kind at a time with --only",
        )


def _write(target: Path, step: Step) -> Filled:
    """Write a step's content beside its target."""
    assert step.content is not None
    filled = fill(target, step.content)
    if step.crc32 is not None and filled.crc32 != step.crc32:
        filled.path.unlink()
        raise ChecksumMismatch(
            f"{step.action.file}: what was put together has CRC-32 {filled.crc32:08x}, the manifest says "
            f"{step.crc32:08x}; nothing was replaced"
        )
    return filled
