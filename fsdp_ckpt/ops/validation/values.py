"""Judge the values of tensors: NaN, infinities, weights of nothing but zeros, and other oddities.

What a value means depends on where it stands. NaN is a fault anywhere. Masks are made of minus infinity, adapters begin
with a matrix of zeros, moments of a rare parameter are zero or tiny: none of that is worth a warning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fsdp_ckpt.catalog import DTYPES, Checkpoint, Problem, Role, Severity, TensorEntry
from fsdp_ckpt.ops.validation.headers import is_there, item_problem
from fsdp_ckpt.ops.validation.wording import finding
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.store.local import LocalStore

__all__ = ["TensorValues", "check_values", "judge_values"]

_DENORMAL_SHARE = 0.1

_FLOATS = frozenset({"float", "float8", "complex"})
_BIAS = re.compile(r"(^|_)bias$")
_STARTS_AT_ZERO = re.compile(
    r"(^|\.)lora_(embedding_)?B(\.|$)|(^|\.)(lokr_w[12]|hada_w2)(_\w)?(\.|$)|(^|\.)b?oft_r(\.|$)|adapter|zero_conv",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorValues:
    """What the values of a tensor are.

    Attributes:
        part: The part that it belongs to.
        name: Its name within the part.
        dtype: Its element type.
        shape: Its shape.
        count: Values that were looked at; less than there are where some could not be read. Of a complex tensor, real
            and imaginary parts count by themselves.
        nan: NaN among them.
        positive_inf: Infinities above zero.
        negative_inf: Infinities below zero.
        zeros: Zeros of either sign.
        denormals: Values that are not zero, but below the smallest normal number of the type.
        minimum: The least finite value; None where there is none, and for complex tensors.
        maximum: The greatest finite value; None likewise.
        constant: Whether all values are the same finite one.
        verified_bytes: Bytes whose recorded checksum was compared on the way.
        unverified_bytes: Bytes without a recorded checksum, where checksums were to be compared.
    """

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    nan: int
    positive_inf: int
    negative_inf: int
    zeros: int
    denormals: int
    minimum: float | None
    maximum: float | None
    constant: bool
    verified_bytes: int = 0
    unverified_bytes: int = 0

    @property
    def inf(self) -> int:
        """Infinities of either sign."""
        return self.positive_inf + self.negative_inf


def check_values(
    checkpoint: Checkpoint,
    sources: Sources,
    *,
    jobs: int,
    meter: Meter | None = None,
    verify: bool = False,
    listener: Callable[[TensorValues], None] | None = None,
) -> Iterator[Problem]:
    """Yield what is odd about the values of all tensors; each byte is read once, replicas are not read.

    What is not where the metadata say is passed over: that was reported when the files were looked at.

    Args:
        checkpoint: The checkpoint.
        sources: Finds raw bytes.
        jobs: Threads.
        meter: Told about bytes of tensors; all tensors of all parts make up 100 %.
        verify: Compare the recorded checksums in the same pass.
        listener: Given the values of each tensor, in the order of the checkpoint.

    Yields:
        Problems, tensor by tensor. Items that are damaged, and checksums that differ, are among them.

    Raises:
        Incompatible: A record needs a package that is not installed.
    """
    from fsdp_ckpt.run.scan import scan_tensors  # imports NumPy

    for part in checkpoint.parts:
        tensors = (_present(tensor, sources.store, meter) for tensor in part.tensors.values())
        for scan in scan_tensors(tensors, sources, jobs=jobs, meter=meter, verify=verify):
            found = scan.statistics
            values = TensorValues(
                part=part.name,
                name=scan.tensor.name,
                dtype=scan.tensor.dtype.name,
                shape=scan.tensor.shape,
                count=found.count,
                nan=found.nan,
                positive_inf=found.positive_inf,
                negative_inf=found.negative_inf,
                zeros=found.zeros,
                denormals=found.denormals,
                minimum=found.minimum,
                maximum=found.maximum,
                constant=found.is_constant,
                verified_bytes=scan.verified_bytes,
                unverified_bytes=scan.unverified_bytes,
            )
            if listener is not None:
                listener(values)
            for error in scan.faults:
                yield item_problem(error, scan.tensor.key)
            yield from judge_values(values, part.role, where=scan.tensor.key)


def _present(tensor: TensorEntry, store: LocalStore, meter: Meter | None) -> TensorEntry:
    """Return a tensor without the chunks that are not where the metadata say."""
    missing = [chunk for chunk in tensor.chunks if not is_there(store, chunk)]
    if not missing:
        return tensor
    if meter is not None:
        meter.add(sum(chunk.numel for chunk in missing) * tensor.dtype.itemsize)
    gone = set(missing)
    return replace(tensor, chunks=[chunk for chunk in tensor.chunks if chunk not in gone])


def judge_values(values: TensorValues, role: Role, *, where: str) -> Iterator[Problem]:
    """Yield what is odd about the values of a tensor.

    NaN and infinities are looked for everywhere. Minus infinity in a mask (by its name), or in a bias of two and more
    dimensions, as masks of attention and of logits are called, is a note only. Zeros, constants and denormals are
    judged in floats of a model that have two and more dimensions above 1, without masks and biases; zeros in matrices
    that adapters set to zero at first (LoRA's B) are a note.

    Args:
        values: The values.
        role: What the tensor's part is for.
        where: What problems name as their place.
    """
    if values.nan:
        yield finding("nan-values", where, f"{_share(values.nan, values.count)} NaN")
    leaf = values.name.rpartition(".")[2]
    dims = sum(length > 1 for length in values.shape)
    is_mask, is_bias = "mask" in leaf, bool(_BIAS.search(leaf))
    if values.inf:
        may_be = (
            values.negative_inf == values.inf and not values.nan and (is_mask or (is_bias and len(values.shape) > 1))
        )
        message = f"{_share(values.inf, values.count)} infinite"
        if may_be:
            message += ", all below zero, as in a mask"
        yield finding("inf-values", where, message, severity=Severity.NOTE if may_be else None)
    dtype = DTYPES[values.dtype]
    whole = math.prod(values.shape) * (2 if dtype.kind == "complex" else 1)
    if role is not Role.MODEL or dtype.kind not in _FLOATS or dims < 2 or is_mask or is_bias or values.count < whole:
        return
    if values.zeros == values.count:
        at_first = bool(_STARTS_AT_ZERO.search(values.name))
        message = f"all {values.count:,} values are zero" + (", as before an adapter's first step" if at_first else "")
        yield finding("all-zero", where, message, severity=Severity.NOTE if at_first else None)
    elif values.constant:
        number = "the same" if values.minimum is None else f"{values.minimum:.6g}"
        yield finding("constant", where, f"all {values.count:,} values are {number}")
    if values.denormals > _DENORMAL_SHARE * values.count:
        percent = f"{100 * values.denormals / values.count:.0f} %"
        message = f"{_share(values.denormals, values.count, percent)} below the normal numbers of {values.dtype}"
        yield finding("denormal", where, message)


def _share(some: int, count: int, percent: str = "") -> str:
    """Return ``3 of 4,096 values are``."""
    if some == count:
        return f"all {count:,} values are" if count > 1 else "its only value is"
    return f"{some:,} of {count:,} values {f'({percent}) ' if percent else ''}{'is' if some == 1 else 'are'}"
