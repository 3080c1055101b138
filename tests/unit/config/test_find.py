"""An open number of ranks is settled by the devices that a job may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_ckpt.config.find import visible_devices, with_processes
from fsdp_ckpt.config.launch import LaunchConfig


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as /dev with eight devices, and the files that are there besides."""
    for name in (*(f"nvidia{i}" for i in range(8)), "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr("fsdp_ckpt.config.find.visible_devices", lambda environ: visible_devices(environ, tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_visible_devices(eight: Path, environ: dict[str, str], count: int) -> None:
    assert visible_devices(environ, eight) == count


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LaunchConfig(num_processes=None), 8),
        (LaunchConfig(num_processes=None, gpu_ids="0,1"), 2),
        (LaunchConfig(num_processes=None, gpu_ids="all"), 8),
        (LaunchConfig(num_processes=None, use_cpu=True), 1),
        (LaunchConfig(num_processes=None, num_machines=2), 16),
        (LaunchConfig(num_processes=5), 5),
    ],
)
def test_an_open_number_of_ranks(eight: Path, config: LaunchConfig, count: int) -> None:
    assert with_processes(config, {}).num_processes == count
