"""Where a pickle can stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.forge_dcp import Forged, index, place, tensor_metadata
from tests.hostile.forge_pickle import Call, Glob, dump
from tests.hostile.forge_zip import saved
from tests.hostile.sandbox import PEAK_BYTES, Case, Outcome

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A checkpoint with a pickle in it.

    Attributes:
        name: For messages.
        path: What to pass to the command.
        read_by_inspect: Whether ``inspect`` has to read the pickle.
    """

    name: str
    path: Path
    read_by_inspect: bool = True


def legacy(pickle: bytes) -> bytes:
    """A file of ``torch.save`` before 1.6 with this pickle as its value."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    return dump(LEGACY_MAGIC) + dump(1001) + dump(facts) + pickle + dump([])


FEW = ("item", "metadata", "full-file", "ranks", "legacy")
"""One place for each way of reading."""


def model_places(folder: Path, pickle: bytes, only: Sequence[str] | None = None) -> list[Place]:
    """Put a pickle wherever a merge would have to read it."""
    folder.mkdir(parents=True)
    forged = Forged()
    forged.tensor("good", (2, 2))
    at = forged.append(saved(None, [bytes(16)], pickle=pickle))
    forged.items["bad"] = tensor_metadata((2, 2), [((0, 0), (2, 2))])
    forged.storage.append((index("bad", (0, 0)), place(*at)))
    forged.write(folder / "item")
    Forged(data={"__0_0.distcp": bytearray(16)}).write(folder / "metadata")
    (folder / "metadata/.metadata").write_bytes(pickle)
    (folder / "no_collectives").mkdir()
    (folder / "no_collectives/__0.metadata").write_bytes(pickle)
    files = {
        "full/pytorch_model.bin": saved(None, [bytes(16)], pickle=pickle),
        "full_fsdp/pytorch_model_fsdp.bin": saved(None, [bytes(16)], pickle=pickle),
        "sharded/pytorch_model-00001-of-00001.bin": saved(None, [bytes(16)], pickle=pickle),
        "ranks/model_world_size_1_rank_0.pt": saved(None, [bytes(16)], pickle=pickle),
        "legacy/model.pt": legacy(pickle),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    places = [
        Place(name="item", path=folder / "item", read_by_inspect=False),
        Place(name="metadata", path=folder / "metadata"),
        Place(name="metadata-file", path=folder / "metadata/.metadata"),
        Place(name="no-collectives", path=folder / "no_collectives"),
        Place(name="full", path=folder / "full"),
        Place(name="full-file", path=folder / "full/pytorch_model.bin"),
        Place(name="full-fsdp", path=folder / "full_fsdp"),
        Place(name="sharded", path=folder / "sharded"),
        Place(name="ranks", path=folder / "ranks"),
        Place(name="legacy", path=folder / "legacy/model.pt"),
    ]
    return [place for place in places if only is None or place.name in only]


def object_places(folder: Path, pickle: bytes) -> list[Place]:
    """Put a pickle where only ``inspect --objects`` reads it, beside a model that is sound."""
    forged = Forged()
    forged.tensor("good", (2, 2))
    forged.item("thing", saved(None, pickle=pickle))
    forged.write(folder / "dcp")
    model = Forged()
    model.tensor("good", (2, 2))
    model.write(folder / "accelerate/pytorch_model_fsdp_0")
    for name in ("random_states_0.pkl", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl"):
        (folder / "accelerate" / name).write_bytes(saved(None, pickle=pickle))
    (folder / "accelerate/dl_state_dict_0.bin").write_bytes(legacy(pickle))
    return [Place(name="dcp", path=folder / "dcp"), Place(name="accelerate", path=folder / "accelerate")]


def commands(places: Sequence[Place], out: Path, *flags: str) -> list[Case]:
    """Return, for every place, a case of ``inspect`` and one of ``merge``."""
    return [
        case
        for place in places
        for case in (
            Case(argv=["inspect", str(place.path), *flags], direct=True),
            Case(argv=["merge", str(place.path), str(out), "--no-fsync"], out=str(out), direct=True),
        )
    ]


def assert_harmless(outcome: Outcome, *folders: Path) -> None:
    """Check what holds for every run on any input: nothing was run, no file elsewhere was read, no trace, no heap."""
    assert not outcome.danger, outcome.danger
    inside = tuple(str(folder) for folder in folders)
    outside = [name for name in outcome.opened if not name.startswith(inside)]
    assert not outside, outside
    assert "Traceback" not in outcome.err, outcome.err
    assert "internal error" not in outcome.err, outcome.err
    assert len(outcome.err) < 10_000, f"{len(outcome.err)} characters of messages"
    assert outcome.peak_bytes < PEAK_BYTES, f"{outcome.peak_bytes >> 20} MiB"
    assert not outcome.hidden, outcome.hidden


def call(module: str, name: str) -> Call:
    """A call without arguments."""
    return Call(Glob(module, name))
