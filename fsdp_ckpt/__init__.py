"""The checkpoint toolkit for PyTorch FSDP.

Importing this package loads nothing heavy; names are imported when they are first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_ckpt.config.accelerate_yaml import read_config
    from fsdp_ckpt.config.fsdp import FSDPConfig
    from fsdp_ckpt.config.launch import LaunchConfig
    from fsdp_ckpt.errors import FsdpCkptError
    from fsdp_ckpt.layouts.runs import latest_complete
    from fsdp_ckpt.ops.convert import ConvertOptions, ConvertReport, convert
    from fsdp_ckpt.ops.diff import DiffReport, diff
    from fsdp_ckpt.ops.inspect import InspectReport, inspect
    from fsdp_ckpt.ops.merge import MergeOptions, MergeReport, merge, merge_fsdp_weights
    from fsdp_ckpt.ops.pull import PullOptions, PullReport, pull
    from fsdp_ckpt.ops.push import PushOptions, PushReport, push
    from fsdp_ckpt.ops.repair import RepairReport, repair
    from fsdp_ckpt.ops.reshard import reshard
    from fsdp_ckpt.ops.validate import ValidateReport, validate
    from fsdp_ckpt.ops.view import CheckpointView, open_checkpoint
    from fsdp_ckpt.train.background import PendingSave
    from fsdp_ckpt.train.checkpointer import Checkpointer
    from fsdp_ckpt.train.dcp_reader import FastFileSystemReader
    from fsdp_ckpt.train.dcp_writer import FastFileSystemWriter
    from fsdp_ckpt.train.export import get_state_dict, save_model
    from fsdp_ckpt.train.hooks import Hooks
    from fsdp_ckpt.train.load import LoadReport, load_state
    from fsdp_ckpt.train.preemption import Preemption
    from fsdp_ckpt.train.save import SaveReport, save_state
    from fsdp_ckpt.train.sharding.wrap import wrap

__version__ = "0.1.0"

__all__ = [
    "CheckpointView",
    "Checkpointer",
    "ConvertOptions",
    "ConvertReport",
    "DiffReport",
    "FSDPConfig",
    "FastFileSystemReader",
    "FastFileSystemWriter",
    "FsdpCkptError",
    "Hooks",
    "InspectReport",
    "LaunchConfig",
    "LoadReport",
    "MergeOptions",
    "MergeReport",
    "PendingSave",
    "Preemption",
    "PullOptions",
    "PullReport",
    "PushOptions",
    "PushReport",
    "RepairReport",
    "SaveReport",
    "ValidateReport",
    "__version__",
    "convert",
    "diff",
    "get_state_dict",
    "inspect",
    "latest_complete",
    "load_state",
    "merge",
    "merge_fsdp_weights",
    "open_checkpoint",
    "pull",
    "push",
    "read_config",
    "repair",
    "reshard",
    "save_model",
    "save_state",
    "validate",
    "wrap",
]

_HOMES = {
    "FsdpCkptError": "errors",
    "ConvertOptions": "ops.conversion.options",
    "ConvertReport": "ops.conversion.report",
    "convert": "ops.convert",
    "reshard": "ops.reshard",
    "DiffReport": "ops.diff",
    "diff": "ops.diff",
    "InspectReport": "ops.inspect",
    "inspect": "ops.inspect",
    "MergeOptions": "ops.merge_plan",
    "MergeReport": "ops.merge",
    "merge": "ops.merge",
    "merge_fsdp_weights": "ops.merge",
    "PullOptions": "ops.sharing.report",
    "PullReport": "ops.sharing.report",
    "pull": "ops.pull",
    "PushOptions": "ops.sharing.report",
    "PushReport": "ops.sharing.report",
    "push": "ops.push",
    "RepairReport": "ops.repair",
    "repair": "ops.repair",
    "ValidateReport": "ops.validate",
    "validate": "ops.validate",
    "CheckpointView": "ops.view",
    "open_checkpoint": "ops.view",
    "latest_complete": "layouts.runs",
    "FSDPConfig": "config.fsdp",
    "LaunchConfig": "config.launch",
    "read_config": "config.accelerate_yaml",
    "Checkpointer": "train.checkpointer",
    "FastFileSystemReader": "train.dcp_reader",
    "FastFileSystemWriter": "train.dcp_writer",
    "Hooks": "train.hooks",
    "LoadReport": "train.load",
    "PendingSave": "train.background",
    "Preemption": "train.preemption",
    "SaveReport": "train.save",
    "get_state_dict": "train.export",
    "load_state": "train.load",
    "save_model": "train.export",
    "save_state": "train.save",
    "wrap": "train.sharding.wrap",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"fsdp_ckpt.{_HOMES[name]}"), name)
    raise AttributeError(f"module `fsdp_ckpt` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
