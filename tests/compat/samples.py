"""The checkpoints that real torch wrote: ../../fixtures, and beside the repository ../shared/golden, edge and real."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "fixtures"
SHARED = REPOSITORY.parent / "shared"
EDGE = FIXTURES / "edge"
REAL = SHARED / "real"


@dataclass(frozen=True)
class Sample:
    """A checkpoint and what is known of it.

    Attributes:
        id: Where it is from, for the name of the test.
        folder: The checkpoint, with the expected values beside it.
        row: Its row of MANIFEST.json.
    """

    id: str
    folder: Path
    row: Mapping[str, Any]

    @property
    def variant(self) -> str:
        """How it was made."""
        return str(self.row["variant"])

    @property
    def torch_version(self) -> tuple[int, int]:
        """The major and minor version that wrote it."""
        major, minor, *_ = str(self.row["torch"]).split(".")
        return int(major), int(minor)

    @property
    def is_flat(self) -> bool:
        """Whether it holds FSDP1's flat parameters, which have no names."""
        return self.variant.startswith("local_state_dict")

    @property
    def is_wrong(self) -> bool:
        """Whether its writer stored wrong values."""
        return str(self.row["content"]) == "wrong"

    @cached_property
    def layout(self) -> dict[str, dict[str, Any]]:
        """What layout.json says of every key of the model that was saved, by its name in the model."""
        groups = json.loads((self.folder / "layout.json").read_text())
        rows = groups.get("model") or groups["all"]
        prefix = "model." if any(key.startswith("model.") for key in rows) else ""
        names = load_file(self.folder / "expected.safetensors")
        return {name: rows[prefix + name] for name in names if prefix + name in rows}

    def expected(self) -> dict[str, Tensor]:
        """Return the tensors that a merge must give: all but those that the writer could not store."""
        whole = load_file(self.folder / "expected.safetensors")
        lacks = {name for text in self.row.get("lacks", ()) for name in ast.literal_eval(text)}
        assert lacks <= whole.keys()
        assert self.is_flat or lacks.isdisjoint(self.layout)
        return {name: value for name, value in whole.items() if name in self.layout and name not in lacks}

    def copy(self, target: Path) -> Path:
        """Copy the checkpoint as the framework left it, without the expected values: they look like a model."""
        shutil.copytree(self.folder, target, ignore=shutil.ignore_patterns("expected*", "layout.json"))
        return target

    def dcp_folders(self) -> list[Path]:
        """Return the folders with a .metadata file."""
        return sorted(path.parent for path in self.folder.rglob(".metadata"))


def _samples(root: Path, label: str) -> list[Sample]:
    rows = json.loads((root / "MANIFEST.json").read_text())
    found = []
    for row in rows:
        version = row["torch"].partition("+")[0]
        folder = root / f"torch-{version}" / row["variant"]
        found.append(Sample(id=f"{label}-{version}-{row['variant']}", folder=folder, row=row))
    return found


SAMPLES = _samples(FIXTURES, "fixtures")
if (SHARED / "golden").is_dir():
    SAMPLES += _samples(SHARED / "golden", "golden")
NAMED = [sample for sample in SAMPLES if not sample.is_flat]
"""Those whose tensors have names."""
RIGHT = [sample for sample in NAMED if not sample.is_wrong]
"""Those that hold the right values."""
EDGES = sorted(path for path in EDGE.iterdir() if path.is_dir())
REALS = sorted(path for path in REAL.iterdir() if path.is_dir()) if REAL.is_dir() else []


def sample_id(value: Any) -> str | None:
    """Name a parametrized test after its sample or folder."""
    if isinstance(value, Sample):
        return value.id
    return value.name if isinstance(value, Path) else None
