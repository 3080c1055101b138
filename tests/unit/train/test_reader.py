"""Reading with several threads: what is read does not depend on their number, and the first error stops all."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_ckpt.train.load as load_module
import fsdp_ckpt.train.reader as reader_module
from fsdp_ckpt import load_state, save_state
from fsdp_ckpt.errors import ChecksumMismatch
from fsdp_ckpt.train.reader import threads_per_rank


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(37, 41) if n % 2 else nn.Linear(41, 37) for n in range(12)))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_reads_the_same(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = net(1), net(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 41)).square().sum().backward()
    optimizer.step()
    save_state(tmp_path / "ckpt", model, optimizer)
    monkeypatch.setattr(load_module, "threads_per_rank", lambda _: threads)
    fresh = torch.optim.AdamW(other.parameters())
    report = load_state(tmp_path / "ckpt", other, fresh)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    moments: list[Any] = [list(one.state.values()) for one in (optimizer, fresh)]
    for mine, theirs in zip(*moments, strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
        assert mine["step"] == theirs["step"]
    num_bytes = sum(param.nbytes for param in model.parameters())
    assert report.read_bytes == 3 * num_bytes
    assert report.verified_bytes >= 3 * num_bytes
    assert not any(param.grad_fn for param in other.parameters())


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_is_found_by_any_thread_before_anything_changes(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = net(1), net(2)
    save_state(tmp_path / "ckpt", model)
    (data,) = (tmp_path / "ckpt/pytorch_model_fsdp_0").glob("*.distcp")
    content = bytearray(data.read_bytes())
    weight = model.get_parameter("7.weight")
    place = bytes(content).index(weight.detach().numpy().tobytes()[:64])
    content[place + 5] ^= 4
    data.write_bytes(content)
    monkeypatch.setattr(load_module, "threads_per_rank", lambda _: threads)
    before = [param.clone() for param in other.parameters()]
    with pytest.raises(ChecksumMismatch, match=r"7\.weight"):
        load_state(tmp_path / "ckpt", other)
    assert all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize(("is_warm", "expected"), [(True, 0), (False, 2)])
def test_one_thread_becomes_two_where_files_are_on_disk(
    is_warm: bool, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = net(1), net(2)
    save_state(tmp_path / "ckpt", model)
    pools: list[int] = []
    real = ThreadPoolExecutor

    def note(count: int, *arguments: Any) -> Any:
        pools.append(count)
        return real(count, *arguments)

    monkeypatch.setattr(load_module, "threads_per_rank", lambda _: 1)
    monkeypatch.setattr(reader_module, "is_cached", lambda _fd, _position: is_warm)
    monkeypatch.setattr(reader_module, "ThreadPoolExecutor", note)
    load_state(tmp_path / "ckpt", other)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert set(pools) == ({expected} if expected else set())


def test_threads_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [threads_per_rank(ranks) for ranks in (1, 8, 12, 24, 999)] == [4, 3, 2, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert threads_per_rank(4096) == 3
