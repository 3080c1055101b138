"""Points at which a caller can watch, change or refuse a save or load.

Unlike Accelerate's hooks under FSDP, which run when the files are written already, these decide what happens: a part
can be left out or replaced, a file added, the whole refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_ckpt.errors import UsageError, Vetoed
from fsdp_ckpt.layouts.manifest import MANIFEST
from fsdp_ckpt.train.destination import is_part_name

__all__ = ["Hooks", "LoadEvent", "SaveEvent", "check_hooks"]


@dataclass(kw_only=True)
class _Event:
    """What is about to happen.

    Attributes:
        path: The checkpoint.
        step: Its step, where known.
        rank: This rank.
        parts: What it will hold, by the names that ``skip`` and ``replace`` take: ``pytorch_model_fsdp_0``,
            ``optimizer_0``, ``scheduler``, ``random_states`` …
    """

    path: str
    step: int | None
    rank: int
    parts: Sequence[str]
    skipped: set[str] = field(default_factory=set)
    replaced: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def skip(self, part: str) -> None:
        """Leave a part out. Call it on every rank."""
        self._known(part)
        self.skipped.add(part)

    def replace(self, part: str, state: Mapping[str, Any]) -> None:
        """Take this state dict for a part instead. Call it on every rank.

        Args:
            part: A model or optimizer; when loading, a model.
            state: Nested dictionaries; tensors may be DTensors, others count as equal on all ranks.
        """
        self._known(part)
        self.replaced[part] = state

    def veto(self, reason: str) -> None:
        """Refuse: nothing is saved or loaded, and every rank raises ``Vetoed``.

        Raises:
            Vetoed: Always.
        """
        raise Vetoed(f"{self.path}: refused by a hook: {reason}")

    def _known(self, part: str) -> None:
        if part not in self.parts:
            raise UsageError(f"there is no part `{part}`; there are: {', '.join(self.parts)}")


@dataclass(kw_only=True)
class SaveEvent(_Event):
    """A save that is about to begin."""

    files: dict[str, bytes] = field(default_factory=dict)

    def add_file(self, name: str, data: bytes) -> None:
        """Put a further file into the checkpoint; what the first rank adds counts."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UsageError(f"the content of `{name}` is {type(data).__name__}, not bytes")
        if "/" in name or name.startswith(".") or not name:
            raise UsageError(f"`{name}` is no plain file name")
        stem, _, ending = name.rpartition(".")
        is_read = ending == "safetensors" or (is_part_name(name) and ending in ("bin", "pt", "pth", "pkl"))
        if is_read or ending == "part" or name == MANIFEST or {name, stem} & set(self.parts):
            raise UsageError(f"`{name}` is a name of something that save_state writes or load_state reads")
        self.files[name] = data


@dataclass(kw_only=True)
class LoadEvent(_Event):
    """A load that has been planned: nothing is checked in detail or changed yet."""


def check_hooks(hooks: Any) -> None:
    """Make sure that hooks are a list of instances.

    Raises:
        UsageError: They are not.
    """
    wrong = [hooks] if not isinstance(hooks, list | tuple) else [hook for hook in hooks if not isinstance(hook, Hooks)]
    if wrong:
        shown = wrong[0].__name__ if isinstance(wrong[0], type) else type(wrong[0]).__name__
        raise UsageError(f"hooks= takes a list of instances of Hooks, not {shown}", hint=f"hooks=[{shown}()]")


class Hooks:
    """Override what you need; each method but ``after_commit`` is called on every rank.

    Example:
        >>> class OnlyAdapters(Hooks):
        ...     def before_save(self, event):
        ...         event.skip("optimizer_0")
    """

    def before_save(self, event: SaveEvent) -> None:
        """Called before anything is written; may skip or replace parts, add files, or veto."""

    def after_commit(self, report: Any) -> None:
        """Called on one rank when the checkpoint is in its place, in the thread that wrote it.

        That is the first one; where nodes have disks of their own, the lowest on each node.

        The place for what takes long and needs no other rank: copying it elsewhere, removing older ones. The
        checkpoint is there whatever happens here: an error is logged.
        """

    def after_save(self, report: Any) -> None:
        """Called when the checkpoint is in its place, with the ``SaveReport``.

        After an asynchronous save, by whoever waits for it: in the caller's thread.
        """

    def before_load(self, event: LoadEvent) -> None:
        """Called before anything in the models is changed; may skip or replace parts, or veto."""

    def after_load(self, report: Any) -> None:
        """Called when everything is loaded, with the ``LoadReport``."""
