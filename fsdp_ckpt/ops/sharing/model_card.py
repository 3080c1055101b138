"""The README.md that a repository gets when it has none: what the checkpoint's own files tell, and nothing else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from fsdp_ckpt import __version__
from fsdp_ckpt.catalog import Checkpoint, Part, Role
from fsdp_ckpt.errors import CorruptCheckpoint
from fsdp_ckpt.layouts.manifest import manifest_of
from fsdp_ckpt.names import printable
from fsdp_ckpt.ops.sharing.hub_address import HubAddress
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.units import format_count, format_size

__all__ = ["write_card"]

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#])")
_SHOWN_CHARACTERS = 120


def write_card(checkpoint: Checkpoint, parts: Sequence[Part], address: HubAddress) -> str:
    """Return the text of a model card.

    Texts from the checkpoint are untrusted: they are shortened, and mean nothing to Markdown or HTML.

    Args:
        checkpoint: The checkpoint.
        parts: Those of its parts that are pushed.
        address: Where to.
    """
    lines = ["---", "tags:", "- pytorch", "- checkpoint", "- fsdp-ckpt"]
    if "config.json" in checkpoint.side_files and any(part.dialect == "safetensors" for part in parts):
        lines.append("library_name: transformers")
    lines += ["---", "", f"# {address.repo.partition('/')[2]}", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_plain(value)} |" for name, value in _facts(checkpoint, parts)]
    place = str(address.at(None))
    lines += [
        "",
        "## Use",
        "",
        "```bash",
        f"fsdp-ckpt inspect {shlex.quote(place)}",
        f"fsdp-ckpt pull {shlex.quote(place)} checkpoint",
        *_next(parts),
        "```",
        "",
        "## To fill in",
        "",
        "What the model is for, what it was trained on, how good it is, and under which licence it may be used.",
        "",
        f"Pushed with fsdp-ckpt {__version__}.",
        "",
    ]
    return "\n".join(lines)


def _facts(checkpoint: Checkpoint, parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    yield "layout", checkpoint.title
    if checkpoint.step is not None:
        yield "training step", f"{checkpoint.step:,}"
    if checkpoint.world_size is not None:
        yield "saved by", f"{checkpoint.world_size} rank{'' if checkpoint.world_size == 1 else 's'}"
    for part in parts:
        if part.role not in (Role.MODEL, Role.OPTIMIZER) or not part.tensors:
            continue
        count = f"{format_count(part.numel)} parameters, " if part.role is Role.MODEL else ""
        name = part.role.value + (f" {_plain(part.name)}" if part.name != part.role.value else "")
        yield name, f"{count}{format_size(part.num_bytes)} ({_dtypes(part)})"
    writers = list(dict.fromkeys(part.writer for part in parts if part.writer))
    if writers:
        yield "written by", ", ".join(writers)
    versions = _versions(checkpoint)
    if versions:
        yield "versions", versions


def _dtypes(part: Part) -> str:
    counts: dict[str, int] = {}
    for tensor in part.tensors.values():
        counts[tensor.dtype.name] = counts.get(tensor.dtype.name, 0) + 1
    return ", ".join(f"{count} tensors {name}" for name, count in sorted(counts.items(), key=lambda one: -one[1]))


def _versions(checkpoint: Checkpoint) -> str:
    try:
        manifest = manifest_of(LocalStore(checkpoint.roots))
    except CorruptCheckpoint:  # whoever pushes without validating knows
        return ""
    versions = manifest.versions if manifest is not None else {}
    return ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions.items())


def _next(parts: Sequence[Part]) -> list[str]:
    models = [part for part in parts if part.role is Role.MODEL]
    if len(models) != 1 or models[0].dialect == "safetensors":
        return []
    return ["fsdp-ckpt merge checkpoint model    # safetensors"]


def _plain(text: str) -> str:
    shown = printable(text)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 1] + "…"
    return _MARKDOWN.sub(r"\\\1", shown)
