"""Decide what a merge writes: which tensors, under which names, in which dtype, in which files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_ckpt.catalog import DType, TensorEntry
from fsdp_ckpt.errors import NameCollision, UsageError
from fsdp_ckpt.names import Rename, clean_fqn, glob_filter
from fsdp_ckpt.plan.output import OutputFile, OutputTensor

__all__ = ["Selection", "find_tie_candidates", "select_tensors", "split_files"]

_HEADER_LIMIT = 90_000_000
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings?|embed|shared|token_embedding)\.weight"
)
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|output|embed_out|output_layer|output_projection|decoder)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Tensors to write, and what happened to names.

    Attributes:
        tensors: In the order of the source.
        renamed: New name by key in the checkpoint, where it changed beyond its part's prefix.
        excluded: Names left out by --include or --exclude.
        tied: Name that is kept, by name that is not written because it is the same tensor.
    """

    tensors: Sequence[OutputTensor]
    renamed: Mapping[str, str] = field(default_factory=dict)
    excluded: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def without(self, tied: Mapping[str, str]) -> Selection:
        """Return the selection with the keys of ``tied`` dropped in favour of their values."""
        kept = [tensor for tensor in self.tensors if tensor.name not in tied]
        return Selection(tensors=kept, renamed=self.renamed, excluded=self.excluded, tied=dict(tied))


def select_tensors(
    entries: Sequence[TensorEntry],
    *,
    dtype: DType | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    renames: Sequence[Rename] = (),
) -> Selection:
    """Clean names, filter, rename, and set dtypes.

    Args:
        entries: Tensors of the model part.
        dtype: Element type for float64/32/16 and bfloat16 tensors; others (integers, bool, complex, float8) keep
            theirs. None keeps all.
        include: Globs over cleaned names; empty for all.
        exclude: Globs over cleaned names.
        renames: Applied in order, after the filter.

    Raises:
        NameCollision: Two tensors would get one name.
        UsageError: Nothing is left.
    """
    keep = glob_filter(include, exclude)
    chosen: dict[str, OutputTensor] = {}
    renamed: dict[str, str] = {}
    excluded: list[str] = []
    for entry in entries:
        clean = name = clean_fqn(entry.name)
        if keep.match(clean) is None:
            excluded.append(clean)
            continue
        for rename in renames:
            name = rename(name)
        if not name:
            raise UsageError(f"a rename rule leaves no name for `{clean}`")
        other = chosen.get(name)
        if other is not None:
            raise NameCollision(
                f"`{other.source.key}` and `{entry.key}` would both be named `{name}`",
                hint="keep them apart with --rename, or leave one out with --exclude",
            )
        if name != entry.name:
            renamed[entry.key] = name
        cast = dtype is not None and entry.dtype.kind == "float"
        chosen[name] = OutputTensor(name=name, dtype=dtype if cast and dtype else entry.dtype, source=entry)
    if not chosen:
        raise UsageError(f"no tensor is left: {len(excluded)} of {len(entries)} do not match --include / --exclude")
    return Selection(tensors=list(chosen.values()), renamed=renamed, excluded=excluded)


def find_tie_candidates(tensors: Sequence[OutputTensor]) -> tuple[OutputTensor, OutputTensor] | None:
    """Return (embedding, output head) when names and shapes suggest that they may be one tensor.

    There must be exactly one of each: several embeddings of one shape are not guessed at.
    """
    embeddings = [tensor for tensor in tensors if _EMBEDDING.fullmatch(tensor.name)]
    heads = [tensor for tensor in tensors if _HEAD.fullmatch(tensor.name) and tensor not in embeddings]
    pairs = [
        (embedding, head)
        for head in heads
        for embedding in embeddings
        if embedding.shape == head.shape and embedding.source.dtype == head.source.dtype
    ]
    return pairs[0] if len(pairs) == 1 else None


def split_files(tensors: Sequence[OutputTensor], *, max_shard_bytes: int, pattern: str) -> list[OutputFile]:
    """Distribute tensors over files as huggingface_hub does: in order, a new file when the limit would be passed.

    A tensor above the limit gets a file of its own. A file is also ended before its header would reach the 100 MB
    that safetensors allows.

    Args:
        tensors: In order.
        max_shard_bytes: Limit for the tensors of one file.
        pattern: File name with ``{suffix}`` (``model{suffix}.safetensors``).
    """
    groups: list[list[OutputTensor]] = []
    current: list[OutputTensor] = []
    size = header = 0
    for tensor in tensors:
        if tensor.num_bytes > max_shard_bytes:
            groups.append([tensor])
            continue
        entry = 120 + 2 * len(tensor.name) + 22 * len(tensor.shape)
        if current and (size + tensor.num_bytes > max_shard_bytes or header + entry > _HEADER_LIMIT):
            groups.append(current)
            current, size, header = [], 0, 0
        current.append(tensor)
        size += tensor.num_bytes
        header += entry
    if current:
        groups.append(current)
    if len(groups) == 1:
        return [OutputFile(name=pattern.format(suffix=""), tensors=groups[0])]
    return [
        OutputFile(name=pattern.format(suffix=f"-{number:05}-of-{len(groups):05}"), tensors=group)
        for number, group in enumerate(groups, start=1)
    ]
