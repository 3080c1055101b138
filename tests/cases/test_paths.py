"""Cases of theme 10: odd paths, URLs, buffers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

import fsdp_ckpt
from tests.cases.check import assert_same, merge_and_load, run
from tests.cases.models import Buffers, Mlp, oddly_named, reference

ODD = "w t/run_lr=[1e-3, 2e-3]_é*/epoch=0-step=10.ckpt"


def test_p53_a_file_url_is_the_plain_path(built: Path, tmp_path: Path) -> None:
    """gcs-connector-for-pytorch#144, pytorch-lightning#19802.

    save_state: test_state_model.
    """
    result = run("merge", f"file://{built / 'p22/pytorch_model_fsdp_0'}", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    _, found = merge_and_load(built / "p22", tmp_path / "again")
    assert_same(found, reference(Mlp()))


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("gs://bucket/a//b", 2, "pip install 'fsdp-ckpt[gs]'"),
        ("xyz://bucket/step-1", 2, "the scheme `xyz` is not supported"),
        ("memory://ck", 7, "does not exist"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_p53_a_url_that_cannot_be_read_is_quoted_unchanged(
    command: str, url: str, code: int, message: str, tmp_path: Path
) -> None:
    """No folder called `gs:`, and the URL is quoted as it was typed. S3 and the hub: tests/remote."""
    result = run(command, url, *(["out"] if command == "merge" else []), cwd=tmp_path)
    assert result.returncode == code
    assert f"`{url}`" in result.stderr
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_p53_an_output_url_is_refused_unchanged(built: Path, tmp_path: Path) -> None:
    """The same on the other side."""
    result = run("merge", built / "p22", "gs://bucket/out", cwd=tmp_path)
    assert result.returncode == 2
    assert "`gs://bucket/out`" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["dcp", "verl", "safetensors"])
def test_p54_brackets_spaces_and_stars_in_paths(kind: str, built: Path, tmp_path: Path) -> None:
    """ray-project/ray#15367, tensorflow/tensorflow#34290: the folder's name is no pattern; nor is a tensor's.

    reshard: test_convert.
    """
    source = tmp_path / ODD
    if kind == "safetensors":
        source.mkdir(parents=True)
        save_file(oddly_named(), source / "model.safetensors")
    else:
        shutil.copytree(built / "p54" / kind, source)
    out = tmp_path / "out [1]" / "*"
    _, found = merge_and_load(source, out)
    assert_same(found, oddly_named())
    described = fsdp_ckpt.inspect(source)
    assert [tensor.name for tensor in described.parts[0].tensors] == list(oddly_named())
    assert described.step == 10
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    assert fsdp_ckpt.inspect(plain).parts == described.parts


def test_p54_hints_can_be_pasted_into_a_shell(built: Path, tmp_path: Path) -> None:
    """Odd paths are quoted."""
    source = tmp_path / ODD
    shutil.copytree(built / "p22/optimizer_0", source / "optimizer_0")
    shutil.copytree(built / "p22/pytorch_model_fsdp_0", source / "pytorch_model_fsdp_0")
    result = run("merge", source / "optimizer_0", tmp_path / "out")
    assert result.returncode == 3
    assert f"fsdp-ckpt merge '{source / 'pytorch_model_fsdp_0'}' {tmp_path / 'out'}" in result.stderr


@pytest.mark.parametrize("variant", ["verl", "one", "dcp"])
def test_p56_buffers_that_are_not_saved_are_not_invented(variant: str, built: Path, tmp_path: Path) -> None:
    """LlamaFactory#10820, lmms-engine#185, transformers#45902: np_buf is in no checkpoint, and in no merged file.

    Left out: validate. load_state, which has to warn: test_state_model.
    """
    assert "np_buf" in dict(Buffers().named_buffers())
    report, found = merge_and_load(built / "p01" / variant, tmp_path / "out")
    assert "np_buf" not in found
    assert not any("np_buf" in text for text in (*report.warnings, *report.notes))
    model = Buffers()
    model.load_state_dict(found, strict=True)
    assert dict(model.named_buffers())["np_buf"].tolist() == [1.0, 1.0, 1.0]
