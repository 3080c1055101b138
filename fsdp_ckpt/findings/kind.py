"""What a kind of finding is."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ckpt.catalog import Severity

__all__ = ["Kind"]

_LETTERS = {"E": Severity.ERROR, "W": Severity.WARNING, "N": Severity.NOTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of finding; the code and the name never change their meaning.

    Attributes:
        code: ``E101``: how bad it usually is (E error, W warning, N note), and its number.
        name: The same in words: ``missing-shard``. Readers put it into ``Problem.code``.
        title: What is wrong, in a few words.
        meaning: What it means for loading.
        causes: How it comes about.
        fix: What to do.
        command: The next command to type; ``{path}`` stands for the checkpoint. Empty where there is none.
    """

    code: str
    name: str
    title: str
    meaning: str
    causes: str
    fix: str
    command: str = ""

    @property
    def severity(self) -> Severity:
        """How bad it usually is; a single finding may be judged otherwise."""
        return _LETTERS[self.code[0]]
