"""Find what stands beside the weights in a folder that transformers opens: config, tokenizer, generation settings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, Unreachable, UsageError
from fsdp_ckpt.layouts.composite import SIDE_FILES
from fsdp_ckpt.ops.side_files import SideFiles, find_side_files, load_config

__all__ = ["export_side_files"]

_MAX_BYTES = 200_000_000
_REASON_CHARACTERS = 600
_MAX_CONFIG_BYTES = 4_000_000
_PATTERNS = (
    "*config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken", "*.jinja", "chat_template.json", "*.py",
)  # fmt: skip
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_NOT_FOR_MODELS = ("adapter_config.json",)
"""Beside a whole model it would make transformers look for an adapter."""


def export_side_files(config_from: str | None, sources: Sequence[Path]) -> SideFiles:
    """Return the files to put beside the weights.

    Where the folder that was asked for has no tokenizer, the one beside the checkpoint is taken.

    Args:
        config_from: A folder, or a model on the hub: ``name``, ``owner/name``, ``owner/name@revision``. None for what
            lies beside the checkpoint.
        sources: Folders of the checkpoint.

    Raises:
        CheckpointNotFound: There is no such folder, or no config.json in it.
        UsageError: Nothing was asked for, and there is no config.json beside the checkpoint.
        Unreachable: The hub does not answer, or has no such model.
    """
    if config_from is None:
        found = find_side_files(*sources)
        if "config.json" not in found.files:
            raise UsageError(
                "no config.json was found beside the checkpoint: without it no folder for transformers can be made",
                hint="--config-from DIR, or a model on the hub: --config-from owner/name",
            )
    else:
        found = _of_folder(Path(config_from)) if Path(config_from).is_dir() else _of_hub(config_from)
        if "config.json" not in found.files:
            raise CheckpointNotFound(f"there is no config.json in `{config_from}`")
        if "tokenizer_config.json" in found.missing:
            beside = find_side_files(*sources)
            files = {**beside.files, **found.files}
            missing = tuple(name for name in found.missing if name not in files)
            found = replace(found, files=files, missing=missing)
    return replace(found, files={name: path for name, path in found.files.items() if name not in _NOT_FOR_MODELS})


def _of_folder(folder: Path) -> SideFiles:
    """List a folder. Links may lead into the hub's cache, where a model's files are kept, and nowhere else."""
    here = folder.resolve()
    allowed = [here]
    if here.parent.name == "snapshots":
        allowed.append(here.parent.parent / "blobs")
    files = {}
    for name in sorted(os.listdir(here)):
        path = (here / name).resolve()
        is_inside = any(path.is_relative_to(root) for root in allowed)
        limit = _MAX_CONFIG_BYTES if name == "config.json" else _MAX_BYTES
        if SIDE_FILES.fullmatch(name) and is_inside and path.is_file() and path.stat().st_size <= limit:
            files[name] = path
    missing = tuple(name for name in ("config.json", "tokenizer_config.json") if name not in files)
    config = load_config(files["config.json"]) if "config.json" in files else {}
    return SideFiles(files=files, missing=missing, config=config)


def _of_hub(name: str) -> SideFiles:
    match = _HUB_ID.fullmatch(name)
    if match is None or name.startswith("."):
        raise CheckpointNotFound(f"there is no folder `{name}`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        folder = snapshot_download(match["repo"], revision=match["revision"], allow_patterns=list(_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]} …"
        raise Unreachable(
            f"`{name}` is no folder here, and could not be fetched from the hub: {reason}",
            hint="give a folder that has the model's config.json: --config-from DIR",
        ) from error
    finally:
        if not were_disabled:
            enable_progress_bars()
    return _of_folder(Path(folder))
