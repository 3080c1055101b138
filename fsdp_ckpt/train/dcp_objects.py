"""Objects of a distributed checkpoint that torch's own planner is going to load, which runs what a pickle asks for."""

from __future__ import annotations

import io
from typing import Any

import torch

from fsdp_ckpt.codec.pickles import Constructor, Machine, Record, UnpicklingError
from fsdp_ckpt.codec.tensors import TORCH
from fsdp_ckpt.codec.torchzip import open_archive
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from fsdp_ckpt.train.objects import decode

__all__ = ["check_object"]

_BUFFER = "_io.BytesIO"
_MAX_DEPTH = 4


def check_object(data: bytes, where: str) -> None:
    """Make sure that ``torch.load`` of an object runs nothing, whatever it is told.

    What ``objects.decode`` takes passes, and beyond that buffers (``io.BytesIO``) of such objects: torchtitan keeps
    its losses in them, and loads what is in them as it loads the object itself.

    Args:
        data: A ``torch.save`` archive or file.
        where: The file and the key, for messages.

    Raises:
        UnsafePickle: It refers to a name that is not allowed; nothing was run.
        MalformedFile: It is damaged.
    """
    _check(data, where, 0)


def _check(data: bytes, where: str, depth: int) -> None:
    try:
        decode(data, where)
    except UnsafePickle as error:
        if error.name != _BUFFER or depth == _MAX_DEPTH:
            raise
        for content in _buffers(data, where):
            if not content:
                continue
            try:
                _check(content, f"{where}, within a buffer", depth + 1)
            except MalformedFile:  # bytes of something else, which may as well be a pickle
                raise error from None


def _buffers(data: bytes, where: str) -> list[bytes]:
    """Return what is in the buffers of an archive that holds nothing else that is not allowed."""
    found: list[Record] = []

    def note(_: Machine, args: tuple[Any, ...]) -> Record:
        found.append(Record(_BUFFER, args))
        return found[-1]

    archive = open_archive(lambda start, num: data[start : start + num], 0, len(data), where=where)
    archive.load({**TORCH, _BUFFER: Constructor(_BUFFER, note)})
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            # Whether the same bytes are to torch what they are to our reader.
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # noqa: TID251
    except (UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise MalformedFile(f"{where}: {error}") from None
    return [_content(record, where) for record in found]


def _content(record: Record, where: str) -> bytes:
    state = record.state if isinstance(record.state, tuple) else record.args
    content = state[0] if state else b""
    if not isinstance(content, bytes):
        raise MalformedFile(f"{where}: a buffer of something that is no bytes")
    return content
