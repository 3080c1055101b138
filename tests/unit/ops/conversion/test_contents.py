"""What is asked of names counts for all that a model and its optimizer have under them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from fsdp_ckpt import convert
from fsdp_ckpt.errors import UsageError
from fsdp_ckpt.ops.conversion.contents import read_param_names
from tests.build import rows, save_dcp


def test_values_of_modules_are_filtered_and_renamed_with_their_weights(tmp_path: Path) -> None:
    """Modules of Transformer Engine have an `_extra_state` each; left under its old name, it finds no module."""
    model = {
        "net.a.weight": rows(torch.arange(6.0), 2),
        "net.a._extra_state": b"one",
        "net.b.weight": rows(torch.arange(4.0), 2),
        "net.b._extra_state": b"two",
    }
    source = save_dcp(tmp_path / "src", {"model": model}, ranks=2)
    report = convert(source, tmp_path / "out", to="dcp", exclude=["net.b.*"], rename=["net.=body."])
    found = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert set(found) == {"model.body.a.weight", "model.body.a._extra_state"}
    assert report.excluded == 2


def test_the_hint_for_a_list_of_names_has_the_order_of_the_optimizer(tmp_path: Path) -> None:
    """The order of named_parameters() is another one as soon as there are two groups."""
    (tmp_path / "names.json").write_text("{}")
    with pytest.raises(UsageError) as refused:
        read_param_names(tmp_path / "names.json")
    assert refused.value.hint is not None
    code = refused.value.hint.partition(": ")[2].replace("json.dump(", "found.append((").replace(", file)", "))")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = torch.optim.SGD([{"params": biases}, {"params": weights}])
    found: list[list[str]] = []
    exec(code, {"model": model, "optimizer": optimizer, "found": found})
    assert found == [["0.bias", "1.bias", "0.weight", "1.weight"]]
