"""What is a URL, what is a path, and what a user reads where a URL cannot be opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fsdp_ckpt
from fsdp_ckpt.errors import FsdpCkptError, Unreachable, UsageError
from fsdp_ckpt.ops.list_run import list_run
from fsdp_ckpt.store.remote.places import place_of
from fsdp_ckpt.store.remote.urls import SCHEMES, is_url, local_path, open_file_system, redact, scheme_of

WITHOUT_PACKAGE = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


@pytest.fixture
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what fsdp-ckpt itself needs is installed."""
    for name in set(WITHOUT_PACKAGE.values()):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("s3://bucket/x", "s3"), ("S3://bucket/x", "s3"), ("gs://b", "gs"), ("hf://org/name@main/x", "hf"),
        ("memory://x", "memory"), ("file:///data/x", "file"), ("abc+d.e-f://x", "abc+d.e-f"), ("s3://", "s3"),
        ("run/step-1", None), ("/data/s3://x", None), ("./s3://x", None), ("C:\\runs\\x", None), ("host:/nfs/x", None),
        ("s3:/bucket/x", None), ("epoch=1:step=2", None), ("", None), ("://x", None), ("1s://x", None),
        (" s3://x", None),
    ],
)  # fmt: skip
def test_schemes(text: str, scheme: str | None) -> None:
    assert scheme_of(text) == scheme
    assert is_url(text) == (scheme not in (None, "file"))


def test_file_urls_are_plain_paths(tmp_path: Path) -> None:
    odd = tmp_path / "w t" / "run_lr=[1e-3]" / "100% #1?x"
    assert local_path(f"file://{odd}") == str(odd)
    assert place_of(f"file://{odd}") == odd
    assert place_of(str(odd)) == odd
    assert place_of(odd) == odd
    assert local_path("relative/x") == "relative/x"


@pytest.mark.usefixtures("_no_packages")
@pytest.mark.parametrize("scheme", sorted(WITHOUT_PACKAGE))
def test_a_missing_package_is_named_with_what_to_type(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P53. The URL is quoted as it was typed, and no folder called ``gs:`` is made."""
    monkeypatch.chdir(tmp_path)
    url = f"{scheme}://bucket/run [1]/step=1//x"
    with pytest.raises(UsageError) as caught:
        open_file_system(url)
    extra = {"gcs": "gs", "abfs": "az"}.get(scheme, scheme)
    assert f"`{url}`" in caught.value.message
    assert WITHOUT_PACKAGE[scheme] in caught.value.message
    assert caught.value.hint == f"pip install 'fsdp-ckpt[{extra}]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["s5", "http", "https", "ftp", "hdfs", "dbfs", "wandb"])
def test_an_unknown_scheme_names_the_known_ones(scheme: str) -> None:
    url = f"{scheme}://bucket/x y"
    with pytest.raises(UsageError) as caught:
        open_file_system(url)
    assert f"`{url}`" in caught.value.message
    for known in ("file://", *(f"{name}://" for name in SCHEMES)):
        assert known in str(caught.value.hint)


@pytest.mark.usefixtures("_no_packages")
@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://bucket/x", "s5://bucket/x", "memory://not-there/x"])
@pytest.mark.parametrize("verb", ["inspect", "validate", "list", "open", "diff", "merge", "convert", "reshard"])
def test_no_verb_takes_a_url_for_a_local_path(
    verb: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FsdpCkptError) as caught:
        call(verb, url)
    assert url in caught.value.message
    assert type(caught.value) in (UsageError, Unreachable)
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


def call(verb: str, url: str) -> object:
    match verb:
        case "inspect":
            return fsdp_ckpt.inspect(url)
        case "validate":
            return fsdp_ckpt.validate(url)
        case "list":
            return list_run(url)
        case "open":
            return fsdp_ckpt.open_checkpoint(url)
        case "diff":
            return fsdp_ckpt.diff(url, url)
        case "merge":
            return fsdp_ckpt.merge(url, "out")
        case "convert":
            return fsdp_ckpt.convert(url, "out", to="safetensors")
        case _:
            return fsdp_ckpt.reshard(url, "out", 2)


@pytest.mark.parametrize("base", ["s3://", "memory://", "memory:///", "s3:///"])
def test_a_url_that_names_nothing(base: str) -> None:
    with pytest.raises(FsdpCkptError) as caught:
        fsdp_ckpt.inspect(base)
    assert caught.value.exit_code in (2, 3, 7)
    assert base.rstrip("/") in caught.value.message


def test_the_path_in_the_file_system_has_no_scheme() -> None:
    assert open_file_system("s3://bucket/run [1]/step=1/")[1] == "bucket/run [1]/step=1"
    assert open_file_system("memory://run/x")[1].strip("/") == "run/x"
    assert open_file_system("S3://bucket/run")[1] == "bucket/run"


@pytest.mark.parametrize("secret", ["plain", "wJalr/K7M+DENG/bPx"])
def test_credentials_in_a_url_are_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_file_system(f"s3://AKIAEXAMPLE:{secret}@bucket/x")
    assert "`s3://bucket/x`" in caught.value.message
    assert secret not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/x y/[1]=é", "s3://bucket/x y/[1]=é"),
        ("s3://key:secret@bucket/x", "s3://bucket/x"),
        ("s3://AKIAEXAMPLE:wJalr/K7M+DENG/bPx@bucket/x", "s3://bucket/x"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/name/x@y", "s3://arn:aws:s3:us-west-2:1:accesspoint/name/x@y"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("http://127.0.0.1:9000/bucket/x@y", "http://127.0.0.1:9000/bucket/x@y"),
        ("hf://org/name@main/x@y", "hf://org/name@main/x@y"),
        ("https://there/x?sig=abc&se=2026", "https://there/x?sig=…&se=2026"),
        ("https://there/x?se=2026&X-Amz-Signature=abc", "https://there/x?se=2026&X-Amz-Signature=…"),
        ("a https://u:p@one/x and https://u:p@two/x", "a https://one/x and https://two/x"),
    ],
)
def test_credentials_are_taken_out_and_nothing_else(text: str, shown: str) -> None:
    assert redact(text) == shown
