"""Names of parameters that several parts of a checkpoint have: a model, and the optimizer that steps it."""

from __future__ import annotations

import re

from fsdp_ckpt.codec.dcp_metadata import DcpMetadata
from fsdp_ckpt.errors import Incompatible
from fsdp_ckpt.ops.repairs.look import load_metadata
from fsdp_ckpt.store.local import Folder

__all__ = ["check_partners"]

_MODEL = re.compile(r"(?:pytorch_)?model(?:_fsdp)?_\d+")
_OPTIMIZER = re.compile(r"optimizer_\d+")
_STATE = re.compile(r"(?:optim\w*\.)?state\.(.+)\.[^.]+")


def check_partners(root: Folder, folder: Folder, metadata: DcpMetadata) -> None:
    """Make sure that names of a model are those that the optimizer beside it has, or the other way round.

    Only where there is one of each: the optimizer of several models has the parameters of all of them.

    Args:
        root: The checkpoint.
        folder: One part of it.
        metadata: What would become the metadata of that part.

    Raises:
        Incompatible: The optimizer has parameters that the model lacks.
    """
    models, optimizers = ([name for name in root.folders if kind.fullmatch(name)] for kind in (_MODEL, _OPTIMIZER))
    here = folder.prefix.rstrip("/")
    if len(models) != 1 or len(optimizers) != 1 or here not in (models[0], optimizers[0]):
        return
    beside = optimizers[0] if here == models[0] else models[0]
    found = load_metadata(root.sub(beside), ".metadata")
    if found is None or found.metadata is None:
        return
    model, optimizer = (metadata, found.metadata) if here == models[0] else (found.metadata, metadata)
    matches = (_STATE.fullmatch(key) for key in optimizer.tensors)
    stated = {match[1] for match in matches if match is not None}
    if any(name.isdigit() or "flat_param" in name for name in stated):  # no names of parameters
        return
    lost = sorted(stated - {ending for key in model.tensors for ending in _endings(key)})
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise Incompatible(f"the optimizer has state of `{lost[0]}`{more}, which the model has not ({beside})")


def _endings(key: str) -> list[str]:
    """Return a name with and without each of what stands before it, as wrappers put it there."""
    words = key.split(".")
    return [".".join(words[number:]) for number in range(len(words))]
