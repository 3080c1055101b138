"""A network and a store that fail: what passes is tried again and nothing is lost, what lasts ends with exit 7."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import fsdp_ckpt
from fsdp_ckpt.errors import FsdpCkptError, Unreachable
from tests.build import assert_same, read_safetensors
from tests.cli.tool import Result, assert_refused, environment, run
from tests.remote.conftest import KEY_ID, SECRET
from tests.remote.proxy import (
    SLOW_DOWN,
    Delay,
    Drop,
    Fault,
    Flip,
    NoRanges,
    Proxy,
    Request,
    Reset,
    Slow,
    Status,
    TooShort,
    reads,
)
from tests.remote.s3_server import Bucket
from tests.remote.store_suite import dcp_folder, model

PASSING: list[Fault] = [
    Status(code=500), Status(code=502), Status(code=503), SLOW_DOWN, Status(code=504), Status(code=429), Reset(),
    Drop(0), Drop(10_000),
]  # fmt: skip
LASTING: list[tuple[Fault, str]] = [
    (SLOW_DOWN, "503"), (Status(code=500), "500"), (Status(code=429), "too many requests"),
    (Reset(), "cannot be reached"), (Drop(10), "cannot be reached"), (Status(code=403), "access is denied"),
    (Status(code=401), "credentials"),
]  # fmt: skip


def label(value: object) -> str:
    return f"{type(value).__name__}{getattr(value, 'code', '')}" if isinstance(value, Fault) else ""


def lists(request: Request) -> bool:
    return "list-type" in request.target


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> str:
    return bucket.upload(dcp_folder(tmp_path / "made/ck"), "run/ck")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "tmp").mkdir()
    return folder


def command(*arguments: str, work: Path, env: dict[str, str]) -> Result:
    return run(*arguments, cwd=work, env=environment(**(env | {"TMPDIR": str(work / "tmp")})))


def left(work: Path) -> list[str]:
    return sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path != work / "tmp")


# ------------------------------------------------------------------------------------------------------ what passes


@pytest.mark.parametrize("fault", PASSING, ids=label)
def test_a_merge_survives_what_passes(fault: Fault, url: str, proxy: Proxy, tmp_path: Path) -> None:
    """The third, fourth and fifth read fail."""
    proxy.fail(fault, after=2, times=3)
    fsdp_ckpt.merge(url, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), model())
    assert sum(request.fault is fault for request in proxy.requests) == 3


@pytest.mark.parametrize("fault", [SLOW_DOWN, Status(code=500), Reset(), Drop(5)], ids=label)
def test_a_listing_survives_what_passes(fault: Fault, url: str, proxy: Proxy) -> None:
    proxy.fail(fault, when=lists, times=3)
    assert len(fsdp_ckpt.inspect(url).parts[0].tensors) == 5


@pytest.mark.parametrize("fault", [Delay(1.0), Slow(3e6)], ids=label)
def test_a_slow_store_is_waited_for(fault: Fault, url: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.fail(fault, times=3)
    fsdp_ckpt.merge(url, tmp_path / "out")
    assert_same(read_safetensors(tmp_path / "out"), model())


# ------------------------------------------------------------------------------------------------------- what lasts


def test_what_lasts_ends_with_exit_7(url: str, proxy: Proxy, work: Path, s3_environment: dict[str, str]) -> None:
    proxy.fail(SLOW_DOWN, after=3)
    result = command("merge", url, "out", work=work, env=s3_environment)
    assert_refused(result, 7)
    assert "503" in result.err
    assert f"`{url}`" in result.err
    assert result.hint
    assert left(work) == []


@pytest.mark.parametrize(("fault", "words"), LASTING, ids=label)
def test_a_merge_that_fails_leaves_nothing(fault: Fault, words: str, url: str, proxy: Proxy, work: Path) -> None:
    proxy.fail(fault, after=3)
    with pytest.raises(Unreachable, match=words) as caught:
        fsdp_ckpt.merge(url, work / "out")
    assert f"`{url}`" in caught.value.message
    assert caught.value.hint
    assert left(work) == []


@pytest.mark.parametrize(("fault", "words"), LASTING, ids=label)
def test_a_store_that_cannot_be_listed(fault: Fault, words: str, url: str, proxy: Proxy) -> None:
    proxy.fail(fault, when=lists)
    with pytest.raises(Unreachable, match=words) as caught:
        fsdp_ckpt.inspect(url)
    assert f"`{url}`" in caught.value.message


@pytest.mark.parametrize("fault", [SLOW_DOWN, Status(code=500), Reset(), Drop(5)], ids=label)
def test_tries_are_counted_once(fault: Fault, url: str, proxy: Proxy) -> None:
    """Libraries try again themselves, each what the one below it has tried: that made minutes of silence."""
    proxy.fail(fault, when=lists)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        fsdp_ckpt.inspect(url)
    assert len(proxy.requests) <= 12
    assert time.monotonic() - began < 5


def test_nobody_there(work: Path, s3_environment: dict[str, str]) -> None:
    """A port on which nothing listens."""
    changes = {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    began = time.monotonic()
    result = command("inspect", "s3://bucket/x", work=work, env=s3_environment | changes)
    assert_refused(result, 7)
    assert "`s3://bucket/x`" in result.err
    assert left(work) == []
    assert time.monotonic() - began < 15


# ------------------------------------------------------------------------------------------------ answers that lie


@pytest.mark.parametrize("fault", [Flip(200_000), TooShort(1)], ids=label)
def test_changed_bytes_are_never_merged(fault: Fault, url: str, proxy: Proxy, tmp_path: Path) -> None:
    """Whatever is said, it is not success: what is changed lies within the large tensor."""
    proxy.fail(fault, when=lambda request: reads(request) and (request.span or (0, 0))[1] > 300_000)
    with pytest.raises(FsdpCkptError) as caught:
        fsdp_ckpt.merge(url, tmp_path / "out")
    assert caught.value.exit_code in (4, 7)
    assert not (tmp_path / "out").exists()


def test_a_proxy_that_ignores_ranges_does_not_mislead(url: str, proxy: Proxy, tmp_path: Path) -> None:
    """HTTP allows the whole object as an answer to a range; its beginning is not the range."""
    proxy.fail(NoRanges())
    with pytest.raises(FsdpCkptError) as caught:
        fsdp_ckpt.merge(url, tmp_path / "out")
    assert caught.value.exit_code in (4, 7)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------ credentials


@pytest.mark.parametrize(
    "case",
    [("inspect", None), ("validate", Reset()), ("merge", None), ("merge", Status(code=403)), ("list", Reset())],
    ids=["inspect", "validate, reset", "merge", "merge, 403", "list, reset"],
)
def test_credentials_are_shown_nowhere(
    case: tuple[str, Fault | None], url: str, proxy: Proxy, work: Path, s3_environment: dict[str, str]
) -> None:
    verb, fault = case
    if fault is not None:
        proxy.fail(fault, when=lambda _: True)
    arguments = [verb, url, *(["out"] if verb == "merge" else []), "--json"]
    result = command(*arguments, work=work, env=s3_environment | {"FSDP_CKPT_DEBUG": "1"})
    assert result.code == (0 if fault is None else 7), result.err
    written = "".join(
        path.read_bytes().decode(errors="replace")
        for path in work.rglob("*")
        if path.is_file() and "safe" not in path.name
    )
    for secret in (KEY_ID, SECRET, "Signature", "AWS4-HMAC"):
        assert secret not in result.out + result.err + written


@pytest.mark.parametrize("verb", ["inspect", "validate", "merge"])
def test_credentials_in_a_url_are_shown_nowhere(
    verb: str, bucket: Bucket, proxy: Proxy, work: Path, s3_environment: dict[str, str]
) -> None:
    url = f"s3://AKIATYPED:hunter2hunter2@{bucket.name}/nothing"
    result = command(verb, url, *(["out"] if verb == "merge" else []), work=work, env=s3_environment)
    assert_refused(result, 2, 3, 7)
    assert "hunter2" not in result.out + result.err
    assert left(work) == []


# ------------------------------------------------------------------------------------------------- without a package


@pytest.mark.parametrize("verb", ["inspect", "merge"])
def test_without_the_package_the_command_says_what_to_install(
    verb: str, work: Path, s3_environment: dict[str, str]
) -> None:
    """gcsfs and adlfs are not installed for the tests."""
    for scheme, extra in (("gs", "gs"), ("az", "az")):
        address = f"{scheme}://bucket/a b/[x]=1//y"
        result = command(verb, address, *(["out"] if verb == "merge" else []), work=work, env=s3_environment)
        assert_refused(result, 2)
        assert f"`{address}`" in result.err
        assert result.hint == f"pip install 'fsdp-ckpt[{extra}]'"
        assert left(work) == []
