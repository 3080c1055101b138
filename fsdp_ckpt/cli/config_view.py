"""Show configurations: each value with where it comes from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_ckpt.config.accelerate_yaml import to_document
from fsdp_ckpt.config.launch import LaunchConfig
from fsdp_ckpt.config.options import OPTIONS
from fsdp_ckpt.config.questions import QUESTIONS
from fsdp_ckpt.config.rules import shown

__all__ = ["as_report", "config_lines", "settings_of"]

_JOB = (
    "distributed_type", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "same_network", "rdzv_backend", "gpu_ids", "use_cpu", "mixed_precision",
)  # fmt: skip


def config_lines(config: LaunchConfig) -> list[str]:
    """Return a table of every value and its origin."""
    rows = list(_rows(config))
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    return [f"{name:{names}}  {value:{values}}  {origin}".rstrip() for name, value, origin in rows]


def _rows(config: LaunchConfig) -> Iterator[tuple[str, str, str]]:
    for name in _JOB:
        value = getattr(config, name)
        if value is not None:
            yield name, shown(value), config.origins.get(name, "default")
    if config.fsdp is None:
        return
    for name in OPTIONS:
        value = getattr(config.fsdp, name)
        if value is not None and name != "mixed_precision":
            text = ",".join(value) or "(the model's _no_split_modules)" if isinstance(value, tuple) else shown(value)
            yield name, text, config.origins.get(name, "default")


def settings_of(config: LaunchConfig) -> str:
    """Return the answers to the wizard's questions on FSDP as ``--set`` arguments."""
    assert config.fsdp is not None
    items = ((question.name, getattr(config.fsdp, question.name)) for question in QUESTIONS if not question.of_job)
    shown_items = [(n, ",".join(v) if isinstance(v, tuple) else shown(v)) for n, v in items if v not in (None, ())]
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in shown_items)


def as_report(config: LaunchConfig, **more: Any) -> dict[str, Any]:
    """Return what ``--json`` prints: Accelerate's keys, origins, notes."""
    origins: dict[str, str] = dict(config.origins)
    notes: Sequence[str] = list(config.notes)
    return {"config": to_document(config), "origins": origins, "notes": notes, **more}
