"""An optimizer's file may say anything: it becomes an optimizer by name, or it is refused with one of our errors."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ckpt.catalog import DTYPES, Chunk, ObjectEntry, Part, Role, TensorEntry
from fsdp_ckpt.codec.pickles import Opaque, Record
from fsdp_ckpt.errors import FsdpCkptError
from fsdp_ckpt.ops.conversion.optimizer import canonical_optimizer
from fsdp_ckpt.ops.conversion.optimizer_forms import by_index, flattened, group_params

_HUGE = st.none().map(lambda _: 10**5000)  # more digits than Python shows
_NAMES = st.sampled_from(["w", "v", "0", "1", "a.b", "module.w", "_orig_mod.v", "", ".", "state", "params", "lr"])
_STEPS: Any = st.sampled_from(["state", "param_groups", "param_groups.0", "state.w", 0, 1, -1, 2**62]) | _NAMES
_PATHS = st.lists(_STEPS, max_size=4).map(tuple) | st.sampled_from(
    [
        ("state", "w", "m"),
        ("state", 0, "m"),
        ("param_groups", 0, "params"),
        ("param_groups", 0, "lr"),
        ("param_groups",),
    ]
)
_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | _HUGE | st.floats() | _NAMES
    | st.just(Opaque("x.Y", ())) | st.just(Record("torch.device", ("cpu",))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(_STEPS | st.none() | _HUGE, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["state", "param_groups", "params", "param_groups.w.lr"]), inner, max_size=3)
        | st.lists(st.fixed_dictionaries({"params": st.lists(st.integers(0, 2) | _NAMES, max_size=3)}), max_size=2)
    ),
    max_leaves=8,
)  # fmt: skip
_SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)


def _tensor(name: str, shape: tuple[int, ...], path: tuple[str | int, ...]) -> TensorEntry:
    chunk = Chunk(offsets=(0,) * len(shape), lengths=shape, file=name, start=0, stop=100)
    return TensorEntry(key=name, name=name, dtype=DTYPES["float32"], shape=shape, chunks=(chunk,), path=path)


@st.composite
def _parts(draw: st.DrawFn) -> Part:
    """Return an optimizer that is mostly in order, with some things in it that are not."""
    owners = draw(st.lists(st.integers(0, 3) if draw(st.booleans()) else _NAMES, unique=True, max_size=4))
    cut = draw(st.integers(0, len(owners)))
    listed = [(("param_groups", number, "params"), part) for number, part in enumerate((owners[:cut], owners[cut:]))]
    options = [(("param_groups", number, "lr"), draw(_VALUES)) for number in range(2)]
    match draw(st.integers(0, 3)):
        case 0:
            rows: list[Any] = [*listed, *options]
        case 1:
            rows = [(("param_groups",), [{"params": part, "lr": 0.1} for _, part in listed])]
        case 2:
            rows = [((f"param_groups.{owner}.lr",), draw(_VALUES)) for owner in owners]
        case _:
            rows = []
    rows += draw(st.lists(st.tuples(_PATHS, _VALUES), max_size=1))
    states: list[Any] = [(("state", owner, "m"), draw(_SHAPES)) for owner in owners if draw(st.booleans())]
    states += draw(st.lists(st.tuples(_PATHS, _SHAPES), max_size=1))
    objects = {}
    for path, value in rows:
        key = ".".join(map(str, path))
        objects[key] = ObjectEntry(key=key, name=key, file="f", start=0, stop=1, value=value, decoded=True, path=path)
    tensors = {key: _tensor(key, shape, path) for path, shape in states for key in [".".join(map(str, path))]}
    return Part(name="optimizer", role=Role.OPTIMIZER, dialect="dcp", tensors=tensors, objects=objects)


@settings(derandomize=True, database=None, deadline=None, max_examples=600)
@given(_parts(), st.lists(st.tuples(_NAMES, _SHAPES), max_size=3))
def test_anything_becomes_an_optimizer_by_name_or_is_refused(part: Part, model: list[Any]) -> None:
    tensors = {name: _tensor(name, shape, (name,)) for name, shape in model}
    beside = Part(name="model", role=Role.MODEL, dialect="torch-file", tensors=tensors)
    try:
        found = canonical_optimizer(part, lambda entry: entry.value, model=beside, scalars=lambda _: b"").part
    except FsdpCkptError:
        return
    listed = [name for params in group_params(found) for name in params]
    assert len(set(listed)) == len(listed)
    assert all(type(name) is str for name in listed)
    paths = [*(entry.path for entry in found.tensors), *(entry.path for entry in found.objects)]
    assert len(set(paths)) == len(paths)
    assert all(path[0] in ("state", "param_groups") and len(path) > 2 for path in paths)
    assert {tensor.source.key for tensor in found.tensors} == set(part.tensors), "no tensor is lost"
    for turn in (by_index, flattened):
        try:
            turned = turn(found)
        except FsdpCkptError:
            continue
        assert {tensor.source.key for tensor in turned.tensors} == set(part.tensors)
