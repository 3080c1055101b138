"""Rules for fully qualified names: wrapper prefixes, renames, globs."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from fsdp_ckpt.errors import UsageError

__all__ = [
    "FLAT_PARAM", "Rename", "clean_fqn", "glob_filter", "is_flat_param", "parse_rename", "printable", "strip_wrappers",
]  # fmt: skip

FLAT_PARAM = "_flat_param"
"""Last component of the name under which FSDP1 keeps a flattened parameter."""

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_fpw_module)\.")
"""Components that FSDP1, activation checkpointing, torch.compile and fairscale put into names, at any depth."""


def strip_wrappers(name: str) -> str:
    """Remove wrapper components, at any depth, and nothing else.

    Example:
        >>> strip_wrappers("module.layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight")
        'module.layers.0.mlp.weight'
    """
    return _WRAPPERS.sub("", name)


def clean_fqn(name: str) -> str:
    """Remove wrapper components, at any depth, and a leading ``module.`` (DDP, FSDP of older versions).

    Example:
        >>> clean_fqn("module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.mlp.weight")
        'layers.0.mlp.weight'
    """
    name = strip_wrappers(name)
    return name.removeprefix("module.") if name != "module." else name


def is_flat_param(name: str) -> bool:
    """Tell whether a name is that of an FSDP1 flat parameter (``…_flat_param`` or fairscale's ``flat_param_0``)."""
    last = name.rpartition(".")[2]
    return last == FLAT_PARAM or re.fullmatch(r"flat_param_\d+", last) is not None


class Rename:
    """A rule ``OLD=NEW``: a plain prefix, or a regular expression when written ``s/PATTERN/REPLACEMENT/``.

    Args:
        text: The rule as the user wrote it.

    Raises:
        UsageError: The text is not a rule, or its regular expression does not compile.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if text.startswith("s/"):
            match = re.fullmatch(r"s/((?:[^/\\]|\\.)+)/((?:[^/\\]|\\.)*)/", text)
            if match is None:
                raise UsageError(f"`{text}` is not a rename rule", hint="write it as OLD=NEW or s/PATTERN/REPLACEMENT/")
            try:
                self._pattern = re.compile(match[1].replace(r"\/", "/"))
                self._replacement = match[2].replace(r"\/", "/")
                self._pattern.sub(self._replacement, "")
            except (re.error, IndexError) as error:
                raise UsageError(f"`{text}` is not a regular expression: {error}") from None
        else:
            old, equals, new = text.partition("=")
            if not equals or not old:
                raise UsageError(f"`{text}` is not a rename rule", hint="write it as OLD=NEW or s/PATTERN/REPLACEMENT/")
            self._pattern = re.compile("^" + re.escape(old))
            self._replacement = new.replace("\\", r"\\")

    def __call__(self, name: str) -> str:
        """Return the new name, the old one where the rule does not apply."""
        return self._pattern.sub(self._replacement, name)


def parse_rename(rules: Iterable[str]) -> tuple[Rename, ...]:
    """Return the rules in order.

    Example:
        >>> rule, = parse_rename(["transformer.=model."])
        >>> rule("transformer.h.0.weight")
        'model.h.0.weight'
    """
    return tuple(Rename(rule) for rule in rules)


def glob_filter(include: Sequence[str], exclude: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern whose ``match`` keeps names fitting one of ``include`` (all if empty), none of ``exclude``.

    Globs are those of the shell: ``*`` also crosses dots, ``?`` is one character, ``[ab]`` one of a set.

    Example:
        >>> keep = glob_filter(["layers.*"], ["*.bias"])
        >>> bool(keep.match("layers.0.weight")), bool(keep.match("layers.0.bias"))
        (True, False)
    """
    wanted = "|".join(fnmatch.translate(glob) for glob in include) or r"(?s:.*)\Z"
    refused = "|".join(fnmatch.translate(glob) for glob in exclude)
    return re.compile(f"(?!{refused})(?:{wanted})" if refused else wanted)


def printable(text: str) -> str:
    r"""Escape control, bidirectional and other invisible characters, so that file contents cannot act on a terminal.

    Example:
        >>> printable("layers.\x1b[31mw")
        'layers.\\x1b[31mw'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
