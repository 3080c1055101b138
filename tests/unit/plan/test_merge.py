from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory

from fsdp_ckpt.catalog import DTYPES, Chunk, Shape, TensorEntry
from fsdp_ckpt.errors import NameCollision, UsageError
from fsdp_ckpt.names import parse_rename
from fsdp_ckpt.plan.merge import Selection, find_tie_candidates, select_tensors, split_files
from fsdp_ckpt.plan.output import OutputTensor

PATTERN = "model{suffix}.safetensors"


def entry(name: str, shape: Shape = (2, 3), dtype: str = "float32", *, key: str | None = None) -> TensorEntry:
    chunk = Chunk((0,) * len(shape), shape, "f", 0, 1)
    return TensorEntry(key=key or f"model.{name}", name=name, dtype=DTYPES[dtype], shape=shape, chunks=(chunk,))


def output(name: str, shape: Shape = (2, 3), dtype: str = "float32") -> OutputTensor:
    return OutputTensor(name=name, dtype=DTYPES[dtype], source=entry(name, shape, dtype))


def by_hub(sizes: Sequence[int], limit: int) -> list[tuple[str, list[str]]]:
    state = {f"w{i}": torch.empty(size, dtype=torch.uint8, device="meta") for i, size in enumerate(sizes)}
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor.numel(),
        get_storage_id=lambda _: None,
        filename_pattern=PATTERN,
        max_shard_size=limit,
    )
    return list(split.filename_to_tensors.items())


def by_us(sizes: Sequence[int], limit: int) -> list[tuple[str, list[str]]]:
    tensors = [output(f"w{i}", (size,), "uint8") for i, size in enumerate(sizes)]
    files = split_files(tensors, max_shard_bytes=limit, pattern=PATTERN)
    return [(file.name, [tensor.name for tensor in file.tensors]) for file in files]


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ([192, 32, 192, 24, 24, 24], 200),  # case P19
        ([192, 32, 192, 24, 24, 24], 5 * 10**9),
        ([100, 100, 100], 200),
        ([100, 100, 100], 199),
        ([100], 1),
        ([300, 10, 10, 300, 10], 100),
        ([10, 300, 10], 20),
        ([0, 0, 0], 1),
        ([5, 0, 5, 0], 5),
        ([1] * 1000, 7),
    ],
)
def test_files_are_split_as_huggingface_hub_does(sizes: list[int], limit: int) -> None:
    assert by_us(sizes, limit) == by_hub(sizes, limit)


def test_random_splits_are_those_of_huggingface_hub() -> None:
    rng = random.Random(3)
    for _ in range(200):
        sizes = [rng.choice([0, 1, 7, 50, 99, 100, 101, 500]) for _ in range(rng.randrange(1, 40))]
        limit = rng.choice([1, 50, 100, 101, 500, 10_000])
        assert by_us(sizes, limit) == by_hub(sizes, limit), (sizes, limit)


def test_sizes_are_those_of_the_result() -> None:
    tensors = [OutputTensor(name=f"w{i}", dtype=DTYPES["bfloat16"], source=entry(f"w{i}", (50,))) for i in range(4)]
    assert [file.num_bytes for file in split_files(tensors, max_shard_bytes=200, pattern=PATTERN)] == [200, 200]


def test_a_file_ends_before_its_header_would_pass_100_mb() -> None:
    name = "x" * 1_000_000
    tensors = [OutputTensor(name=f"{name}{i}", dtype=DTYPES["int8"], source=entry("w", (1,))) for i in range(120)]
    files = split_files(tensors, max_shard_bytes=10**12, pattern=PATTERN)
    assert len(files) > 1
    assert [t.name for file in files for t in file.tensors] == [t.name for t in tensors]
    assert all(sum(len(tensor.name) for tensor in file.tensors) < 100_000_000 for file in files)


def select(entries: list[TensorEntry], **options: object) -> Selection:
    return select_tensors(entries, **options)  # type: ignore[arg-type]


def test_names_are_cleaned_and_reported() -> None:
    # Case P09.
    names = [
        "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.attn.weight",
        "module.layers.0.mlp.weight",
        "norm.weight",
    ]
    found = select([entry(name) for name in names])
    assert [tensor.name for tensor in found.tensors] == ["layers.0.attn.weight", "layers.0.mlp.weight", "norm.weight"]
    assert found.renamed == {
        f"model.{names[0]}": "layers.0.attn.weight",
        f"model.{names[1]}": "layers.0.mlp.weight",
    }


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(NameCollision, match=r"`model\.a\.w` and `model\.module\.a\.w` would both be named `a\.w`"):
        select([entry("a.w"), entry("module.a.w")])
    with pytest.raises(NameCollision, match=r"`x\.w`"):
        select([entry("a.w"), entry("b.w")], renames=parse_rename(["a.=x.", "b.=x."]))


def test_a_collision_with_something_left_out_is_none() -> None:
    found = select([entry("a.w"), entry("b.w"), entry("c.w")], renames=parse_rename(["b.=a."]), exclude=["a.*"])
    assert [tensor.name for tensor in found.tensors] == ["a.w", "c.w"]
    assert found.excluded == ["a.w"]


def test_filters_see_cleaned_names_and_renames_come_after() -> None:
    entries = [entry("_orig_mod.a.w"), entry("b.w"), entry("a.bias")]
    found = select(entries, include=["a.*"], exclude=["*.bias"], renames=parse_rename(["a.=z."]))
    assert [tensor.name for tensor in found.tensors] == ["z.w"]
    assert found.excluded == ["b.w", "a.bias"]
    assert found.renamed == {"model._orig_mod.a.w": "z.w"}


def test_nothing_left_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor is left: 2 of 2"):
        select([entry("a.w"), entry("b.w")], include=["c.*"])
    with pytest.raises(UsageError, match="leaves no name"):
        select([entry("a.w")], renames=parse_rename(["a.w="]))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_only_common_floats_are_cast(name: str) -> None:
    (tensor,) = select([entry("w", dtype=name)], dtype=DTYPES["bfloat16"]).tensors
    floats = ("float64", "float32", "float16", "bfloat16")
    assert tensor.dtype.name == ("bfloat16" if name in floats else name)
    assert tensor.is_cast == (name in floats and name != "bfloat16")
    assert tensor.num_bytes == 6 * tensor.dtype.itemsize


def test_no_dtype_casts_nothing() -> None:
    found = select([entry(name, dtype=name) for name in DTYPES])
    assert not any(tensor.is_cast for tensor in found.tensors)
    assert [tensor.name for tensor in found.tensors] == list(DTYPES), "in the order of the source"


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], (0, 1)),
        (["lm_head.weight", "x", "transformer.wte.weight"], (2, 0)),
        (["tok_embeddings.weight", "output.weight"], (0, 1)),
        (["gpt_neox.embed_in.weight", "embed_out.weight"], (0, 1)),
        (["shared.weight", "lm_head.weight"], (0, 1)),
        (["embed.weight", "lm_head.weight"], (0, 1)),
        (["embed.weight", "other_embed.weight", "lm_head.weight"], (0, 2)),
        (["a.embed.weight", "b.embed.weight", "lm_head.weight"], None),  # which one?
        (["embed.weight", "lm_head.bias"], None),
        (["lm_head.weight"], None),
        (["embed.weight"], None),
        (["embed_tokens.weight", "layers.0.mlp.output_gate.weight"], None),
    ],
)
def test_tie_candidates(names: list[str], pair: tuple[int, int] | None) -> None:
    tensors = [output(name) for name in names]
    found = find_tie_candidates(tensors)
    assert found == (None if pair is None else (tensors[pair[0]], tensors[pair[1]]))


@pytest.mark.parametrize("head", [output("lm_head.weight", (2, 4)), output("lm_head.weight", dtype="bfloat16")])
def test_candidates_have_one_shape_and_dtype(head: OutputTensor) -> None:
    assert find_tie_candidates([output("embed.weight"), head]) is None


def test_dropping_tied_tensors() -> None:
    found = Selection(tensors=[output("a"), output("b")], renamed={"k": "a"}, excluded=["x"]).without({"b": "a"})
    assert [tensor.name for tensor in found.tensors] == ["a"]
    assert (found.tied, found.renamed, found.excluded) == ({"b": "a"}, {"k": "a"}, ["x"])
