"""What is read is of one version, also when somebody writes to the same place meanwhile; and what readers are told."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save

import fsdp_ckpt
from fsdp_ckpt.errors import IncompleteCheckpoint, MalformedFile, Unreachable, UsageError
from tests.remote.hub_server import Hub, use_hub
from tests.remote.s3_server import Bucket

NAMES = [f"weight{number}" for number in range(6)]
"""Tensors that together are more than is kept of a file."""


def weights(value: float) -> bytes:
    return save({name: np.full(1_500_000, value, np.float32) for name in NAMES})


def test_a_branch_is_read_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub(tmp_path / "hub") as hub:
        repo = hub.add_repo("owner/name", {"run/model.safetensors": weights(1.0)})
        use_hub(hub, monkeypatch, tmp_path / "home")
        for url in ("hf://owner/name/run", "hf://owner/name@main/run", "hf://models/owner/name/run"):
            view = fsdp_ckpt.open_checkpoint(url)
            commit = repo.branches["main"]
            hub.add_commit(repo, {"run/model.safetensors": weights(2.0)})
            assert {float(view.get_tensor(name)[-1]) for name in NAMES} == {1.0}
            hub.add_commit(repo, {"run/model.safetensors": weights(1.0)})
            assert repo.branches["main"] != commit


def test_an_object_that_was_replaced_is_not_mixed_with_the_old_one(bucket: Bucket) -> None:
    bucket.put("run/model.safetensors", weights(1.0))
    view = fsdp_ckpt.open_checkpoint(bucket.url("run"))
    assert float(view.get_tensor(NAMES[0])[-1]) == 1.0
    bucket.put("run/model.safetensors", weights(2.0))

    def last_values() -> set[float]:
        return {float(view.get_tensor(name)[-1]) for name in NAMES}

    with pytest.raises(MalformedFile, match="replaced while it was being read") as caught:
        last_values()
    assert caught.value.hint


def test_an_object_that_was_removed_is_named() -> None:
    fs, base = fsspec.filesystem("memory"), uuid.uuid4().hex
    fs.pipe_file(f"/{base}/run/model.safetensors", weights(1.0))
    view = fsdp_ckpt.open_checkpoint(f"memory://{base}/run")
    fs.rm(f"/{base}", recursive=True)
    with pytest.raises(IncompleteCheckpoint, match=r"model.safetensors was removed while it was being read"):
        view.get_tensor(NAMES[-1])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://owner/nam", "there is no such repository, or it is private"),
        ("hf://owner/name@nope", "there is no such revision"),
        ("hf://owner/name@" + "a" * 40, "there is no such revision"),
        ("hf://owner/name/step-11", "does not exist"),
    ],
)
def test_what_is_wrong_is_said_as_by_pull(url: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub(tmp_path / "hub") as hub:
        hub.add_repo("owner/name", {"model.safetensors": save({"weight": np.ones(3, np.float32)})})
        use_hub(hub, monkeypatch, tmp_path / "home")
        with pytest.raises(Unreachable) as caught:
            fsdp_ckpt.inspect(url)
        assert said in caught.value.message


@pytest.mark.parametrize("url", ["hf://gpt2", "hf://owner/name@", "hf://owner/na me", "hf://buckets/owner/name"])
def test_what_is_no_address_is_a_mistake_of_use(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub(tmp_path / "hub") as hub:
        use_hub(hub, monkeypatch, tmp_path / "home")
        with pytest.raises(UsageError) as caught:
            fsdp_ckpt.inspect(url)
        assert "hf://[datasets/]OWNER/REPO" in str(caught.value.hint)


def test_a_server_that_stays_in_trouble_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub tries six times itself: our tries come on top, and must not make that minutes."""
    with Hub(tmp_path / "hub") as hub:
        hub.add_repo("owner/name", {"model.safetensors": save({"weight": np.ones(3, np.float32)})})
        use_hub(hub, monkeypatch, tmp_path / "home")
        hub.fail("resolve", status=503, times=1000)
        with pytest.raises(Unreachable, match="503"):
            fsdp_ckpt.inspect("hf://owner/name")
        assert hub.count("resolve") <= 12


def test_odd_names_beside_a_checkpoint_are_no_matter_of_it(bucket: Bucket) -> None:
    bucket.put("run/step-1/model.safetensors", save({"weight": np.ones(3, np.float32)}))
    for name in ("step-1", "n" * 300, "x//y"):
        bucket.put(f"run/{name}", b"")
    assert fsdp_ckpt.inspect(bucket.url("run/step-1")).parts[0].num_tensors == 1
