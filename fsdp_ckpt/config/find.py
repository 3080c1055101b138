"""Which configuration is meant when none is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.config.accelerate_yaml import read_config
from fsdp_ckpt.config.launch import LaunchConfig

__all__ = ["DEFAULT_NAME", "find_config", "visible_devices", "with_processes"]

DEFAULT_NAME = "fsdp.yaml"


def find_config(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[LaunchConfig, str]:
    """Read the configuration that is named, or the one that is found, or take the defaults.

    Args:
        path: The file; None to look for ``fsdp.yaml`` here, then for the file that ``accelerate config`` writes.
        environ: Variables of the process.

    Returns:
        The configuration, and what it is in words: the file, or ``defaults``.

    Raises:
        UsageError: As ``read_config``.
    """
    candidates = [Path(path)] if path is not None else [Path(DEFAULT_NAME), _accelerate_default(environ)]
    for candidate in candidates:
        if path is not None or candidate.is_file():
            return read_config(candidate), str(candidate)
    return LaunchConfig(num_processes=None), "defaults"


def _accelerate_default(environ: Mapping[str, str]) -> Path:
    """Return where ``accelerate config`` writes to."""
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "~"), ".cache")
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def visible_devices(environ: Mapping[str, str], folder: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA devices that a process would see, without loading CUDA."""
    present = sum(path.name.removeprefix("nvidia").isdecimal() for path in folder.glob("nvidia*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]), present)


def with_processes(config: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
    """Settle an open number of processes: one per device of this machine, or one."""
    if config.num_processes is not None:
        return config
    chosen = environ if config.gpu_ids in (None, "all") else {**environ, "CUDA_VISIBLE_DEVICES": str(config.gpu_ids)}
    on_cpu = config.use_cpu or config.distributed_type == "MULTI_CPU"
    count = (1 if on_cpu else max(visible_devices(chosen), 1)) * config.num_machines
    origins = dict(config.origins) | {"num_processes": "one per device"}
    return replace(config, num_processes=count, origins=origins)
