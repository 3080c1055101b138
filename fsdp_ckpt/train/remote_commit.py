"""Save a checkpoint to a URL: each rank uploads what it has written, and the manifest makes it one, at the end.

Object stores cannot rename, and so cannot replace a folder in one step. What a save does, in this order:

1. Every rank writes its files to a temporary folder of its own. Nothing has changed at the URL when that fails.
2. The first rank puts a mark there, and takes down what it replaces: the manifest, then the metadata, then the rest.
3. Every rank uploads its files. They tell each other how that went; when one has failed, all raise, and what this save
   has put there is removed again.
4. The first rank adds small files and metadata, looks whether everything is there with its size, and puts the manifest,
   which is the last object. Then the mark goes.

Whoever reads in between finds a mark and no manifest: an incomplete checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, FsdpCkptError, IncompleteCheckpoint, NotEnoughSpace
from fsdp_ckpt.layouts.manifest import MANIFEST, write_manifest
from fsdp_ckpt.run.checksum import crc32
from fsdp_ckpt.store.leftovers import LOCK, saving_mark, unfinished_marks
from fsdp_ckpt.store.remote.upload import by_commit
from fsdp_ckpt.store.remote.urls import redact
from fsdp_ckpt.store.temporary import make_temporary, remove_temporary
from fsdp_ckpt.train.commit import sizes_of, write_files
from fsdp_ckpt.train.destination import check_replaceable
from fsdp_ckpt.train.files import FileFacts
from fsdp_ckpt.train.ranks import Ranks, has_lost_touch
from fsdp_ckpt.train.remote_objects import Objects, take_down
from fsdp_ckpt.train.save_plan import SaveJob

__all__ = ["commit_remote"]

_LOOKS = 3
_LOOK_AGAIN_S = 1.0
"""Not every store lists an object at once."""

_log = logging.getLogger("fsdp_ckpt")


def commit_remote(job: SaveJob, url: str, ranks: Ranks, *, overwrite: bool) -> dict[str, int]:
    """Write everything here, upload it, and put the manifest there. A collective.

    Returns:
        Size in bytes of every file, by path; on every rank.

    Raises:
        FsdpCkptError: On all ranks, when it fails on one; nothing of this save is left there. What was there before is
            as it was, unless the failure came after it had been taken down.
    """
    doing = f"saving {redact(url)}"
    save = _RemoteSave(job, url, ranks, doing)
    try:
        save.job = job = replace(job, save_id=ranks.from_first(lambda: save.look(overwrite=overwrite), doing))
        with ranks.together(doing):
            save.begin()
        try:
            files, shared = write_files(job, save.folder, ranks, durable=False, doing=doing)
        except NotEnoughSpace as error:
            where = save.folder.parent
            error.hint = f"what is uploaded is written to {where} first: set TMPDIR to a disk with more room"
            raise
        ranks.from_first(lambda: save.replace_old([*files, *shared]), doing)
        with ranks.together(doing):
            save.upload()
        save.is_committing = True
        return ranks.from_first(lambda: save.finish(files, shared), doing)
    except BaseException as error:
        save.undo(error)
        raise
    finally:
        save.close()


class _RemoteSave:
    """What one rank does at the URL, and how to undo it.

    Args:
        job: What is saved.
        url: Where to.
        ranks: The ranks.
        doing: For messages.

    Attributes:
        job: What is saved, with the id of the save.
        is_committing: Whether the first rank may have put the manifest.
    """

    def __init__(self, job: SaveJob, url: str, ranks: Ranks, doing: str) -> None:
        self.job = job
        self.is_committing = False
        self._url = url
        self._ranks = ranks
        self._doing = doing
        self._objects: Objects | None = None
        self._folder: Path | None = None
        self._has_mark = False
        self._owns_place = False
        self._begun: list[str] = []
        self._left: set[str] = set()

    @property
    def folder(self) -> Path:
        """Where this rank writes."""
        assert self._folder is not None
        return self._folder

    @property
    def objects(self) -> Objects:
        """What is at the URL: for the first rank what was there at the beginning, nothing for others."""
        return self._objects or self._open()

    def _open(self) -> Objects:
        self._objects = self._objects or Objects(self._url, found=None if self._ranks.is_first else {})
        return self._objects

    @property
    def _mark(self) -> str:
        return saving_mark(self.job.save_id)

    def look(self, *, overwrite: bool) -> str:
        """Look at what is there; return the id of this save. By the first rank.

        Raises:
            DestinationExists: Something that must not be replaced.
        """
        self._left = self.objects.unfinished()
        is_dead = self.objects.sizes.keys() <= self._left
        if not is_dead or not self.objects.sizes:
            check_replaceable(self.objects.path, overwrite=overwrite)
        return self.job.save_id

    def begin(self) -> None:
        """Make a temporary folder, and open the file system."""
        self._folder = make_temporary("save")
        for part in self.job.parts:
            if part.is_folder:
                (self._folder / part.name).mkdir()
        self._open()

    def replace_old(self, names: Iterable[str]) -> None:
        """Mark the place, and take down what was there. By the first rank.

        Args:
            names: What will be put there.
        """
        old = self.objects.sizes
        self._has_mark = True
        self.objects.mark(self.folder, self._mark, [*names, *old])
        if old:
            _log.info("taking down what was at %s", self.objects.url)
            self._has_mark = False  # until that is done, what is left needs it
            take_down(self.objects, old)
            self._has_mark = True
        self._owns_place = True
        self.objects.failed.update(self._left)  # an upload of a rank that was killed may still hold parts
        try:
            self.objects.abort()
        except FsdpCkptError as error:  # one may be allowed to write, and not to ask for this
            _log.info("parts of uploads that did not end may be left at %s: %s", self.objects.url, error)

    def upload(self) -> None:
        """Upload what this rank has written."""
        names = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]
        self.objects.put_files(self.folder, sorted(set(names) - {LOCK}), self._begun)

    def finish(self, files: Mapping[str, FileFacts], shared: Mapping[str, bytes]) -> dict[str, int]:
        """Add what the ranks share, and the manifest when everything is there. By the first rank."""
        facts = dict(files)
        for path in sorted(shared, key=lambda path: (by_commit(path), path)):
            facts[path] = len(shared[path]), f"{crc32(shared[path], 0):08x}"
            self._begun.append(path)
            self.objects.put_bytes(self.folder, path, shared[path])
        manifest = write_manifest(replace(self.job.manifest, save_id=self.job.save_id, files=facts))
        self._check(facts)
        try:
            self.objects.put_bytes(self.folder, MANIFEST, manifest)
        except BaseException:  # it may be there all the same, and has to go before anything else does
            self.objects.remove([MANIFEST])
            raise
        try:
            self.objects.remove([self._mark])
        except FsdpCkptError as error:  # beside a manifest it says nothing
            _log.warning("%s is saved, but could not be tidied up: %s", self.objects.url, error)
        return sizes_of(facts, manifest)

    def _check(self, facts: Mapping[str, FileFacts]) -> None:
        """Look whether everything but the manifest is there, and nobody else is at it.

        Raises:
            DestinationExists: Another job saves to the same place.
            IncompleteCheckpoint: Something is not there.
        """
        faults: list[str] = []
        for look in range(_LOOKS):
            if look:
                time.sleep(_LOOK_AGAIN_S * float(os.environ.get("FSDP_CKPT_RETRY_SCALE", "1")))
            there = self.objects.now()
            if set(unfinished_marks(there)) != {self._mark}:
                raise DestinationExists(
                    f"another job is saving to `{self.objects.url}`", hint="let every job save to a place of its own"
                )
            faults = [
                f"{name} has {there.get(name, 'no')} bytes there, and {size} here"
                for name, (size, _) in facts.items()
                if there.get(name) != size
            ]
            if not faults:
                return
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise IncompleteCheckpoint(
            f"`{self.objects.url}`: after the upload {faults[0]}{more}",
            hint="save again; does something else remove objects there?",
        )

    def undo(self, error: BaseException) -> None:
        """Remove what this save has put there, as far as that can be done.

        Where nobody knows whether the first rank has put the manifest, what is there stays. So it does where another
        job puts objects of the same names.
        """
        if self._objects is None or (self.is_committing and not self._ranks.is_first and has_lost_touch(error)):
            return
        try:
            if not (self.is_committing and isinstance(error, DestinationExists)):
                names = self._begun
                if self._owns_place:  # also what a rank has put there that died
                    names = [*names, *self.objects.now()]
                take_down(self.objects, [name for name in dict.fromkeys(names) if name != self._mark])
            if self._has_mark:
                self.objects.remove([self._mark])
            self.objects.abort()  # last, as it is seldom needed and may not be allowed
        except Exception as left:  # noqa: BLE001 - what failed first is what is raised
            _log.warning("%s failed, and what it has uploaded is left there: %s", self._doing, left)

    def close(self) -> None:
        """Remove everything that is here."""
        if self._folder is not None:
            remove_temporary(self._folder)
        if self._objects is not None:
            self._objects.close()
