"""What tests of the reader and the writer for dcp share: calls that succeed, our errors within torch's, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fsdp_ckpt import FastFileSystemWriter, FsdpCkptError
from tests.build import grid, rows, save_dcp

__all__ = ["flip", "load_all", "load_error", "save", "save_error", "save_pieces", "tensors_of"]


def load_all(reader: Any) -> dict[str, Any]:
    """Everything by key, by the planner of torch's own converter."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat: dict[str, Any] = flatten_state_dict(state)[0]
    return flat


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def load_error(reader: Any, state: dict[str, Any], **options: Any) -> FsdpCkptError:
    """Our error within torch's."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, **options)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, FsdpCkptError), error
    return error


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 16
    file.write_bytes(data)


def save_pieces(folder: Path) -> dict[str, Tensor]:
    """Save tensors cut into rows and grids, some stored by columns; return the whole ones."""
    torch.manual_seed(0)
    whole = {
        "rows": torch.randn(29, 7),
        "grid": torch.randn(12, 10),
        "columns": torch.randn(16, 9),
        "0-d": torch.tensor(2.5),
    }
    columns = rows(whole["columns"], 2)
    state: dict[str, Any] = {
        "rows": rows(whole["rows"], 3),
        "grid": grid(whole["grid"], [[5], [3, 7]], ranks=2),
        "columns": type(columns)(whole["columns"], columns.boxes, columns.owners, by_columns=True),
        "0-d": whole["0-d"],
    }
    save_dcp(folder, state, ranks=3)
    return whole


def save(state: dict[str, Any], folder: Path, **options: Any) -> Metadata:
    metadata: Metadata = dcp.save(state, storage_writer=FastFileSystemWriter(folder, **options), no_dist=True)
    return metadata


def save_error(call: Callable[[], Any]) -> FsdpCkptError:
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, FsdpCkptError), error
    return error
