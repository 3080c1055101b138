"""Read a checkpoint at a URL by many ranks: one listing for all of them, and each byte once per rank that needs it.

Hundreds of ranks that list the same bucket at the same moment are told to slow down. The first rank lists, and hands
its list to the others; each makes a mirror of its own from it. What a rank needs of the data is fetched to its mirror
once, in long ranges, before it is checked and loaded.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Problem
from fsdp_ckpt.layouts.manifest import MANIFEST, Manifest, check_stamps
from fsdp_ckpt.store.local import Folder, LocalStore
from fsdp_ckpt.store.remote.mirror import Listing, Mirror, mirror
from fsdp_ckpt.store.remote.mirrors import mirror_of
from fsdp_ckpt.train.ranks import Ranks

__all__ = ["FarFiles"]

_CONNECTIONS = 8
_PIECE_BYTES = 8 << 20
_GAP_BYTES = 256 << 10
"""Ranges that are nearer to each other than this are fetched together."""

_log = logging.getLogger("fsdp_ckpt")

Span = tuple[str, int, int]
"""File, first byte, and the byte after the last."""

Choose = Callable[[Path], tuple[Path, list[str]]]
"""Returns which checkpoint in a mirror is meant, and what to warn of."""


class FarFiles:
    """A checkpoint at a URL, as one rank sees it.

    Args:
        path: Its folder or file in a mirror.

    Attributes:
        path: As given.
        url: The checkpoint's URL, without credentials.
    """

    def __init__(self, path: Path) -> None:
        found = mirror_of(path)
        assert found is not None, "the path is in a mirror"
        self._mirror: Mirror = found
        self.path = path
        self._root = path if path.is_dir() else path.parent
        self.url = found.shown(path)

    @classmethod
    def open(cls, url: str, choose: Choose, ranks: Ranks, doing: str) -> tuple[FarFiles, list[str]]:
        """List what is there and choose a checkpoint of it, by the first rank for all. A collective.

        Returns:
            The checkpoint, and what to warn of.

        Raises:
            FsdpCkptError: On all ranks, when there is nothing, or it cannot be listed.
        """
        mine: list[FarFiles] = []

        def begin() -> tuple[str, Listing, list[str]]:
            path, warnings = choose(mirror(url).path)
            mine.append(cls(path))
            return mine[0].url, mine[0]._mirror.listing(path), warnings

        chosen, listing, warnings = ranks.from_first(begin, doing)
        with ranks.together(doing):
            if not mine:
                mine.append(cls(mirror(chosen, listing).path))
        return mine[0], warnings

    def fetch_index(self) -> None:
        """Fetch what says where everything is: the manifest, and ``.metadata`` files."""
        names = [MANIFEST, ".metadata", *(f"{entry.name}/.metadata" for entry in sorted(self._root.iterdir()))]
        for name in names:
            if (self._root / name).is_file():
                self._mirror.materialise(str(self._root / name))

    def check_stamps(self, manifest: Manifest | None, ranks: Ranks) -> list[Problem]:
        """Look at the first bytes of this rank's share of the data files; see ``layouts.manifest.check_stamps``.

        All ranks together look at each file once. Without a manifest the first rank looks at all of them, as only one
        who knows all of them can tell that they are of one save.
        """
        below = Folder(LocalStore(self.path))
        if manifest is None:
            folders = sorted(below.folders) if ranks.is_first else ()
            files = [f"{name}/{file}" for name in folders for file in below.sub(name).files]
            return list(check_stamps(below, None, files))
        share = sorted(path for path in manifest.files if path.endswith(".distcp"))[ranks.rank :: ranks.size]
        return list(check_stamps(below, replace(manifest, files={path: manifest.files[path] for path in share})))

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch ranges of files to the local disk, where they are then read more than once.

        Where there is no room for them they are left where they are, and fetched whenever they are read.

        Raises:
            Unreachable: They cannot be had.
        """
        pieces = list(_pieces(spans))
        needed = sum(stop - start for _, start, stop in pieces)
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        sharing = int(here) if here.isdecimal() and int(here) else 1
        if needed * sharing > shutil.disk_usage(self._mirror.top).free // 2:  # which may be memory
            _log.info("%s: no room for %d bytes in %s: they are fetched twice", self.url, needed, self._mirror.top)
            return

        def hold(piece: Span) -> None:
            path, start, stop = piece
            self._mirror.hold(str(self._root / path), start, stop)

        with ThreadPoolExecutor(_CONNECTIONS, "fsdp-ckpt-fetch") as pool:
            running = [pool.submit(hold, piece) for piece in pieces]
            try:
                for one in running:
                    one.result()
            except OSError as error:  # other ranks fill the same disk
                pool.shutdown(cancel_futures=True)
                if error.errno is None:  # it is the network's
                    raise
                _log.info("%s: %s: what is left is fetched twice", self._mirror.top, error.strerror)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def close(self) -> None:
        """Remove the mirror's folder."""
        self._mirror.close()


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield ranges that cover others: neighbours together, long ones in pieces."""
    runs: list[Span] = []
    for path, start, stop in sorted(set(spans)):
        if runs and runs[-1][0] == path and start - runs[-1][2] <= _GAP_BYTES:
            runs[-1] = (path, runs[-1][1], max(stop, runs[-1][2]))
        else:
            runs.append((path, start, stop))
    for path, start, stop in runs:
        for position in range(start, stop, _PIECE_BYTES):
            yield path, position, min(position + _PIECE_BYTES, stop)
