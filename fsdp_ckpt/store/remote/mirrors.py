"""Which mirrors there are; nothing else is imported, as every local read asks."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_ckpt.store.remote.mirror import Mirror

__all__ = [
    "Traffic",
    "add_mirror",
    "close_mirrors",
    "has_mirrors",
    "materialise",
    "mirror_of",
    "shown",
    "traffic_of",
    "with_urls",
]

_MAX_MIRRORS = 64
_MIRRORS: OrderedDict[str, Mirror] = OrderedDict()
_LOCK = threading.Lock()


@dataclass(slots=True)
class Traffic:
    """What was fetched: requests and bytes."""

    requests: int = 0
    num_bytes: int = 0


def add_mirror(made: Mirror) -> None:
    """Keep a mirror; the one that was not used for longest goes when there are many."""
    with _LOCK:
        _MIRRORS[str(made.top)] = made
        old = [_MIRRORS.popitem(last=False)[1] for _ in range(len(_MIRRORS) - _MAX_MIRRORS)]
    for one in old:
        one.close()


def close_mirrors() -> None:
    """Remove all mirrors."""
    with _LOCK:
        old = list(_MIRRORS.values())
        _MIRRORS.clear()
    for one in old:
        one.close()


def mirror_of(path: str | os.PathLike[str]) -> Mirror | None:
    """Return the mirror that a path is in."""
    if not _MIRRORS:
        return None
    text = os.fspath(path)
    with _LOCK:
        for top, found in _MIRRORS.items():
            if text == top or text.startswith(top + "/"):
                _MIRRORS.move_to_end(top)  # the one that goes first is the one that nobody has used for longest
                return found
    return None


def _begin_anew() -> None:
    """Go on in a forked process: what its parent's threads were doing, nobody does here."""
    _LOCK.release()
    for one in _MIRRORS.values():
        one.begin_anew()


os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_begin_anew)


def has_mirrors() -> bool:
    """Tell whether anything remote was read in this process."""
    return bool(_MIRRORS)


def with_urls(text: str) -> str:
    """Return a text with URLs in the place of paths in mirrors."""
    with _LOCK:
        for top, one in _MIRRORS.items():
            if top in text:
                text = text.replace(top + "/", f"{one.scheme}://").replace(top, f"{one.scheme}:/")
    return text


def materialise(path: Path) -> Path:
    """Make sure that a file's bytes are on the local disk: those of one in a mirror are fetched."""
    found = mirror_of(path)
    if found is not None:
        found.materialise(str(path))
    return path


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path for people: of one in a mirror, its URL."""
    found = mirror_of(path)
    return os.fspath(path) if found is None else found.shown(Path(path))


def traffic_of(paths: Iterable[Path]) -> Traffic | None:
    """Return what was fetched for the mirrors that some paths are in; None where none is in one."""
    found = {id(one): one for one in map(mirror_of, paths) if one is not None}
    if not found:
        return None
    total = Traffic()
    for one in found.values():
        total.requests += one.cache.traffic.requests
        total.num_bytes += one.cache.traffic.num_bytes
    return total
