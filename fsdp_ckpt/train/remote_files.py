"""Read a checkpoint whose files lie on the disks of several nodes: ranks hand each other what a node lacks.

A rank that lacks files gets a second folder, beside the checkpoint's own as far as readers are concerned. In it small
files are copies, and data files are holes of the right size, into which only the records go that the rank needs. On
the nodes that saved, those are a few small ones: each rank finds its shards on its own disk.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from fsdp_ckpt.catalog import Checkpoint, Chunk, Role, TensorEntry
from fsdp_ckpt.errors import IncompleteCheckpoint
from fsdp_ckpt.layouts.elsewhere import of_rank, rank_of
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, write_manifest
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.syscalls import write_all
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["RemoteFiles", "find_remote"]

_BLOCK_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10
"""Tensors of options up to this size are fetched before it is known which of them are needed."""

Range = tuple[str, int, int]
"""File, first byte, and the byte after the last."""


class RemoteFiles:
    """What other nodes have of a checkpoint. Every rank has to make one, also when it lacks nothing.

    Args:
        place: The checkpoint's folder on this node; it need not exist.
        manifest: Its manifest.
        owners: For each file the lowest rank that has it; files that nobody has are left out.
        lacking: Files that this rank lacks.
        ranks: The ranks.
    """

    def __init__(
        self, place: Path, manifest: Manifest, owners: dict[str, int], lacking: Sequence[str], ranks: Ranks
    ) -> None:
        self._store = LocalStore(place)
        self._manifest = manifest
        self._owners = owners
        self._lacking = {path for path in lacking if path in owners}
        self._ranks = ranks
        self._fetched: set[Range] = set()
        self._folder: Path | None = None
        self._place = place

    @property
    def roots(self) -> list[Path]:
        """Folders that hold, between them, what this rank may read."""
        return [root for root in (self._place, self._folder) if root and root.is_dir() and any(root.iterdir())]

    def has(self, path: str) -> bool:
        """Tell whether a file that is not here is on another node."""
        return path in self._lacking

    def begin(self, doing: str) -> None:
        """Make this rank's folder, and fetch small files. A collective."""
        small: list[Range] = []
        with self._ranks.together(doing):
            if self._lacking:
                self._folder = Path(tempfile.mkdtemp(prefix="fsdp-ckpt-"))
                if not (self._place / MANIFEST).is_file():
                    (self._folder / MANIFEST).write_bytes(write_manifest(self._manifest))
                small = list(self._prepare(self._folder))
        self.fetch(small, doing)

    def _prepare(self, folder: Path) -> Iterable[Range]:
        for path in sorted(self._lacking):
            is_data = path.endswith(".distcp")
            if not is_data and rank_of(path) not in (None, self._ranks.rank):
                continue  # another rank's random states
            size = self._manifest.files[path][0]
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / path, "xb") as file:
                file.truncate(size)
            if not is_data:
                yield path, 0, size

    def fetch_small(self, checkpoint: Checkpoint, doing: str) -> None:
        """Fetch what planning looks at: objects, and tensors that are neither weights nor state. A collective."""
        wanted: list[Range] = []
        for part in checkpoint.parts:
            wanted += [(entry.file, entry.start, entry.stop) for entry in part.objects.values()]
            options = [entry for entry in part.tensors.values() if part.role is not Role.MODEL and not _is_state(entry)]
            chunks = [chunk for entry in options for chunk in entry.chunks]
            wanted += [(one.file, one.start, one.stop) for one in chunks if one.stop - one.start <= _SMALL_BYTES]
        self.fetch(wanted, doing)

    def fetch_chunks(self, chunks: Iterable[Chunk], doing: str) -> None:
        """Fetch records. A collective."""
        self.fetch([(chunk.file, chunk.start, chunk.stop) for chunk in chunks], doing)

    def fetch(self, ranges: Iterable[Range], doing: str) -> None:
        """Fetch ranges of files, those that this rank lacks and has not fetched yet. A collective.

        Raises:
            FsdpCkptError: On all ranks, when a rank cannot read or write.
        """
        mine = sorted({one for one in ranges if one[0] in self._lacking} - self._fetched)
        failed: Exception | None = None
        for rank, wanted in enumerate(self._ranks.gather_all(mine, doing)):
            for owner, pieces in self._batches(wanted):
                try:
                    if self._ranks.rank == owner:
                        self._send(pieces, rank)
                    elif self._ranks.rank == rank:
                        self._receive(pieces, owner)
                except (OSError, IncompleteCheckpoint) as error:
                    failed = failed or error
        self._ranks.agree(failed, doing)
        self._fetched.update(mine)

    def _batches(self, ranges: Sequence[Range]) -> Iterator[tuple[int, list[Range]]]:
        """Yield what travels in one message: its sender, and ranges that are together no longer than a block."""
        batch: list[Range] = []
        owner, size = -1, 0
        for path, start, stop in ranges:
            for position in range(start, stop, _BLOCK_BYTES):
                length = min(_BLOCK_BYTES, stop - position)
                if batch and (owner != self._owners[path] or size + length > _BLOCK_BYTES):
                    yield owner, batch
                    batch, size = [], 0
                owner, size = self._owners[path], size + length
                batch.append((path, position, position + length))
        if batch:
            yield owner, batch

    def _send(self, pieces: Sequence[Range], rank: int) -> None:
        data, position, failed = bytearray(sum(stop - start for _, start, stop in pieces)), 0, None
        for path, start, stop in pieces:
            try:
                data[position : position + stop - start] = self._store.reader(path)(start, stop - start)
            except Exception as error:  # noqa: BLE001 - the other rank waits for the bytes, whatever they are
                failed = error
            position += stop - start
        self._ranks.send(torch.frombuffer(data, dtype=torch.uint8), rank)
        if failed is not None:
            raise IncompleteCheckpoint(f"{pieces[0][0]} cannot be read: {failed}") from failed

    def _receive(self, pieces: Sequence[Range], owner: int) -> None:
        size, position = sum(stop - start for _, start, stop in pieces), 0
        data = self._ranks.receive(torch.Size([size]), torch.uint8, owner).cpu().numpy().data
        assert self._folder is not None
        for path, start, stop in pieces:
            fd = os.open(self._folder / path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_all(fd, data[position : position + stop - start], start)
            finally:
                os.close(fd)
            position += stop - start

    def close(self) -> None:
        """Remove this rank's folder."""
        self._store.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _is_state(entry: TensorEntry) -> bool:
    return bool(entry.path) and entry.path[0] == "state"


def find_remote(place: Path, manifest: Manifest | None, ranks: Ranks, doing: str) -> RemoteFiles | None:
    """Find out which ranks lack files of a checkpoint that another rank has. A collective.

    Args:
        place: The checkpoint's folder on this node; it need not exist.
        manifest: The manifest on this node, None where there is none.
        ranks: The ranks.
        doing: For messages.

    Returns:
        What fetches them; None when all ranks see the same files.

    Raises:
        IncompleteCheckpoint: Nodes hold different saves, or a file is on no node of the job.
    """

    def look(listed: Manifest | None) -> list[str]:
        if listed is None:
            return []
        store = LocalStore(place)
        return [path for path in listed.files if store.size(path) is None]

    mine: list[str] = []
    with ranks.together(doing):
        mine = look(manifest)
    rows = ranks.gather_all((platform.node(), manifest.save_id if manifest else None, mine), doing)
    first = rows[0][1]
    for rank, (host, save_id, _) in enumerate(rows):
        if save_id not in (None, first):
            raise IncompleteCheckpoint(
                f"{place}: rank {rank} on {host} has another save of it than rank 0 on {rows[0][0]}: nodes with disks "
                "of their own were cut off while the checkpoint was replaced",
                hint="load an older one, or copy the folders of all nodes from one save",
            )
    lacking = [theirs for _, _, theirs in rows]
    if any(save_id is None for _, save_id, _ in rows):
        manifest = ranks.from_first(lambda: manifest, doing)
        with ranks.together(doing):
            mine = look(manifest)
        lacking = ranks.gather_all(mine, doing)
    if manifest is None or all(theirs == lacking[0] for theirs in lacking):
        return None
    owners: dict[str, int] = {}
    for rank, theirs in enumerate(lacking):
        for path in manifest.files.keys() - set(theirs):
            owners.setdefault(path, rank)
    nowhere = [path for path in sorted(manifest.files) if path not in owners]
    if nowhere:
        more = f" and {len(nowhere) - 1} others" if len(nowhere) > 1 else ""
        raise IncompleteCheckpoint(
            f"{place}: {nowhere[0]}{of_rank(nowhere[0])}{more} is on no node of this job",
            hint="start the job on the nodes that saved it, or copy that file to one of these",
        )
    return RemoteFiles(place, manifest, owners, lacking[ranks.rank], ranks)
