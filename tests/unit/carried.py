"""Carry out tasks into a file, one tensor after the other, and read it back without our code."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fsdp_ckpt.plan.output import OutputTensor
from fsdp_ckpt.run.copy import Copier, TaskResult
from fsdp_ckpt.run.fold import fold_tasks
from fsdp_ckpt.run.progress import Meter
from fsdp_ckpt.run.sources import Sources
from fsdp_ckpt.run.tasks import cut_tasks

GAP = 7
"""Bytes between tensors, that must stay as they are."""


def carry_out(
    tensors: Sequence[OutputTensor], root: Path, out: Path, *, verify: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, list[TaskResult]]]:
    """Return the tensors that were written, and what their tasks told."""
    found: dict[str, torch.Tensor] = {}
    results: dict[str, list[TaskResult]] = {}
    with Sources(root) as sources:
        meter = Meter(sum(tensor.num_bytes for tensor in tensors), None)
        copier = Copier(sources, meter, verify=verify)
        for number, tensor in enumerate(tensors):
            file = out / str(number)
            filler = b"\xa5" * (tensor.num_bytes + 2 * GAP)
            file.write_bytes(filler)
            fd = os.open(file, os.O_RDWR)
            position, told = GAP, []
            tasks = (
                cut_tasks(tensor.source, tensor.dtype, position=position)
                if tensor.addition is None
                else fold_tasks(tensor, None, position=position)
            )
            try:
                for task in tasks:
                    told.append(task.carry_out(copier, fd))
                    crc = told[-1].crc32
                    if crc is not None:
                        assert crc == zlib.crc32(os.pread(fd, task.num_bytes, task.position))
            finally:
                os.close(fd)
            written = file.read_bytes()
            assert (written[:GAP], written[-GAP:]) == (filler[:GAP], filler[:GAP])
            dtype = getattr(torch, tensor.dtype.name)
            value = torch.frombuffer(bytearray(written[GAP:-GAP]), dtype=dtype).reshape(tensor.shape)
            found[tensor.name], results[tensor.name] = value, told
        copier.finish()
    return found, results


def totals(results: Mapping[str, Sequence[TaskResult]]) -> tuple[int, int]:
    """Return bytes that were compared, and records without checksum."""
    told = [result for some in results.values() for result in some]
    return sum(one.verified_bytes for one in told), sum(one.unverified for one in told)
