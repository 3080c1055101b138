"""Addresses on the hub are read as huggingface_hub reads them, and what is none is refused without its secrets."""

from __future__ import annotations

import pytest
from huggingface_hub.utils._hf_uris import parse_hf_uri

from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.sharing.hub_address import parse_hub_address

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "url",
    [
        "hf://owner/repo",
        "hf://models/owner/repo",
        "hf://datasets/owner/repo/step-10/model",
        "hf://spaces/owner/repo@main",
        "hf://owner/repo@v1.0/a/b.safetensors",
        "hf://owner/repo@refs/pr/3/a/b",
        "hf://owner/repo@refs/pr/3",
        "hf://owner/repo@refs/convert/parquet/a",
        "hf://owner/repo@feature%2Fnew/a",
        f"hf://owner/repo@{COMMIT}/a",
        "hf://o/r_e.p-o",
    ],
)
def test_addresses_mean_what_they_mean_to_huggingface_hub(url: str) -> None:
    theirs, ours = parse_hf_uri(url), parse_hub_address(url)
    assert (ours.kind, ours.repo, ours.revision, ours.path) == (
        theirs.type, theirs.id, theirs.revision, theirs.path_in_repo,
    )  # fmt: skip
    assert parse_hub_address(str(ours)) == ours
    again = parse_hf_uri(str(ours))
    assert (again.type, again.id, again.revision, again.path_in_repo) == (
        theirs.type, theirs.id, theirs.revision, theirs.path_in_repo,
    )  # fmt: skip


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/key", "owner/repo", "hf://", "hf://repo", "hf://datasets/repo", "hf://owner/repo@", "hf://owner/",
        "hf:///repo", "hf://ow ner/repo", "hf://owner/re..po", "hf://owner/re--po", "hf://owner/repo/../../etc",
        "hf://owner/repo/a//b", "hf://owner/repo/./a", "hf://-owner/repo",
        "hf://buckets/owner/name", "hf://kernels/owner/name/x",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_the_form(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hub_address(url)
    assert "hf://" in (caught.value.hint or "")


def test_tokens_in_urls_are_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        parse_hub_address("hf://user:hf_secret@owner/repo")
    assert "secret" not in caught.value.message + str(caught.value.hint)


def test_options_say_what_the_url_leaves_open() -> None:
    found = parse_hub_address("hf://owner/repo", revision="v1", path="/a/b/")
    assert (found.revision, found.path) == ("v1", "a/b")
    same = parse_hub_address("hf://owner/repo@v1/a", revision="v1", path="a")
    assert (same.revision, same.path) == ("v1", "a")
    for options in ({"revision": "v2"}, {"path": "b"}):
        with pytest.raises(UsageError, match="the URL says"):
            parse_hub_address("hf://owner/repo@v1/a", **options)
    with pytest.raises(UsageError, match="no path"):
        parse_hub_address("hf://owner/repo", path="../x")


def test_only_commits_are_pinned() -> None:
    assert parse_hub_address(f"hf://owner/repo@{COMMIT}").is_pinned
    assert not parse_hub_address("hf://owner/repo@main").is_pinned
    assert not parse_hub_address("hf://owner/repo").is_pinned
    assert parse_hub_address("hf://owner/repo/a").inside("b/c") == "a/b/c"
    assert parse_hub_address("hf://owner/repo").inside("b/c") == "b/c"
