"""Write a configuration file: whole or not at all, and never over another by accident."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_ckpt.errors import DestinationExists, UsageError

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str, *, overwrite: bool = False) -> None:
    """Write a small file in one step.

    Args:
        path: Where; its folder has to exist.
        text: What.
        overwrite: Replace a file that is there.

    Raises:
        DestinationExists: There is a file, and ``overwrite`` is off; or a folder.
        UsageError: The folder is not there.
    """
    target = Path(path)
    if target.is_dir():
        raise DestinationExists(
            f"{target}: this is a folder", hint=f"give a file in it, such as {target / 'fsdp.yaml'}"
        )
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}", hint=f"mkdir -p {target.parent}")
    beside = target.with_name(f".{target.name}.fsdp-ckpt-{os.urandom(8).hex()}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(beside, target)
        else:
            os.link(beside, target)  # unlike a rename, this never replaces
    except FileExistsError:
        raise DestinationExists(f"{target}: there is a file already", hint="add --overwrite to replace it") from None
    finally:
        beside.unlink(missing_ok=True)
