from __future__ import annotations

from typing import Any, Literal

import pytest

from fsdp_ckpt.catalog import DTYPES, TensorEntry
from fsdp_ckpt.errors import StateMismatch
from fsdp_ckpt.train.model_plan import Fit

Resize = Literal["grow", "truncate"] | None


def _entry(shape: tuple[int, ...], dtype: str = "float32") -> TensorEntry:
    return TensorEntry(key="w", name="w", dtype=DTYPES[dtype], shape=shape, chunks=())


@pytest.mark.parametrize(
    ("saved", "live", "resize", "fits"),
    [
        ((4, 3), (4, 3), None, True),
        ((4, 3), (5, 3), None, False),
        ((4, 3), (5, 3), "grow", True),
        ((4, 3), (4, 5), "grow", True),
        ((5, 3), (4, 3), "grow", False),
        ((5, 3), (4, 4), "grow", False),
        ((5, 3), (4, 3), "truncate", True),
        ((5, 3), (4, 4), "truncate", True),
        ((12,), (4, 3), "truncate", False),
        ((4, 3, 1), (4, 3), "grow", False),
        ((), (1,), "truncate", False),
    ],
)
def test_shapes(saved: tuple[int, ...], live: tuple[int, ...], resize: Resize, fits: bool) -> None:
    fit = Fit()
    assert fit.compare(_entry(saved), "w", live, "float32", resize) is fits
    assert fit.mismatched == ({} if fits else {"w": (saved, live)})
    assert fit.resized == ({"w": (saved, live)} if fits and saved != live else {})


@pytest.mark.parametrize(
    ("saved", "live", "outcome"),
    [
        ("float32", "float32", "same"),
        ("float32", "bfloat16", "cast"),
        ("bfloat16", "float64", "cast"),
        ("float8_e4m3fn", "float32", "cast"),
        ("int64", "int32", "refused"),
        ("int64", "float32", "refused"),
        ("float32", "int64", "refused"),
        ("bool", "uint8", "refused"),
        ("complex64", "float32", "refused"),
        ("float32", "complex64", "refused"),
        ("int64", "int64", "same"),
    ],
)
def test_dtypes(saved: str, live: str, outcome: str) -> None:
    fit = Fit()
    assert fit.compare(_entry((2,), saved), "w", (2,), live, None) is (outcome != "refused")
    assert fit.cast == ({"w": f"{saved} -> {live}"} if outcome == "cast" else {})
    assert fit.wrong_kind == ({"w": f"{saved} -> {live}"} if outcome == "refused" else {})
    if outcome == "refused":
        with pytest.raises(StateMismatch, match=f"other kinds of dtype: w: {saved} -> {live}") as caught:
            fit.raise_for("the model", strict=False)
        assert caught.value.mismatched == ["w"]


def test_nothing_is_raised_where_all_fits() -> None:
    Fit(cast={"w": "float32 -> bfloat16"}, resized={"w": ((1,), (2,))}).raise_for("the model", strict=True)


def test_names_count_when_strict_only() -> None:
    fit = Fit(missing=["a"], unexpected=["b", "c"])
    fit.raise_for("the model", strict=False)
    with pytest.raises(StateMismatch) as caught:
        fit.raise_for("the model", strict=True)
    assert str(caught.value) == (
        "the checkpoint does not fit the model: missing in the checkpoint: a; only in the checkpoint: b, c; "
        "nothing was changed"
    )
    assert (caught.value.missing, caught.value.unexpected) == (["a"], ["b", "c"])
    assert "strict=False" in str(caught.value.hint)


def test_shapes_are_shown_as_python_shows_them() -> None:
    fit = Fit(mismatched={"w": ((4,), (5, 3)), "s": ((), (1,))}, missing=["a"])
    with pytest.raises(StateMismatch) as caught:
        fit.raise_for("the optimizer", strict=False)
    assert "w is (4,) in the checkpoint, (5, 3) here, s is () in the checkpoint, (1,) here" in str(caught.value)
    assert "missing" not in str(caught.value)
    assert (list(caught.value.missing), list(caught.value.mismatched)) == ([], ["w", "s"])
    assert caught.value.hint == "leave them as they are: exclude=['w', 's']"


@pytest.mark.parametrize(
    ("shapes", "hint"),
    [
        ({"w": ((4, 2), (5, 2))}, 'resize="grow"'),
        ({"w": ((5, 2), (4, 2))}, 'resize="truncate"'),
        ({"w": ((4, 2), (5, 2)), "v": ((3,), (2,))}, 'resize="truncate"'),
    ],
)
def test_the_hint_fits_the_shapes(shapes: Any, hint: str) -> None:
    with pytest.raises(StateMismatch) as caught:
        Fit(mismatched=shapes).raise_for("the model", strict=True)
    assert hint in str(caught.value.hint)


def test_of_many_names_the_message_shows_some_and_the_exception_has_all() -> None:
    names = [f"layers.{number}.weight" for number in range(40)]
    with pytest.raises(StateMismatch) as caught:
        Fit(missing=names).raise_for("the model", strict=True)
    assert "layers.11.weight and 28 more" in str(caught.value)
    assert caught.value.missing == names
