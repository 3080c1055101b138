"""The save_state and load_state halves of themes 7 and 8: optimizers, schedulers, data loaders, random states.

What several ranks did is in `played`, see `state_ranks`; the rest is loaded here, without a process group.
"""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.optim import AdamW

import fsdp_ckpt
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.cases.check import assert_same
from tests.cases.judge import stock
from tests.cases.models import Mlp, reference
from tests.cases.state_resume import draw, resumed
from tests.cases.state_training import Position, blank, groups_of, seeded, three_groups, train, two_groups
from tests.cases.test_pickles import Touch
from tests.cases.test_training_state import NAMES, REST, WEIGHTS, pickled_globals
from tests.dist.stage import outcomes

pytestmark = pytest.mark.dist


def assert_same_moments(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Fail unless both hold the same kinds of state for the same parameters, bit by bit."""
    assert sorted(found) == sorted(expected)
    for name, state in expected.items():
        assert_same(found[name], state)


def assert_trained(moments: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
    """Fail when moments are those of an optimizer that has not seen real gradients: a test would compare nothing."""
    assert sorted(moments) == sorted(NAMES)
    for state in moments.values():
        assert state["step"] == steps
        assert state["exp_avg"].count_nonzero() and state["exp_avg_sq"].count_nonzero()  # noqa: PT018


# P33 ------------------------------------------------------------------------------------------------------------------


def test_p33_a_fresh_optimizer_gets_its_moments(played: Path) -> None:
    """KempnerForge#115: exp_avg, exp_avg_sq and step are there right after load, in new processes."""
    for saved, found in zip(outcomes(played, "p33_save"), outcomes(played, "p33_resume"), strict=True):
        assert_trained(saved["moments"], 2)
        assert_same_moments(found["moments"], saved["moments"])
        assert_same(found["state"], saved["state"])
        assert (found["step"], found["fresh"]) == (2, [])


def test_p33_training_goes_on_as_if_nothing_had_happened(played: Path) -> None:
    """Bit-identical to four steps in one go; saving changed nothing either."""
    for saved, found in zip(outcomes(played, "p33_save"), outcomes(played, "p33_resume"), strict=True):
        assert_same(found["end"], saved["control"])
        assert_same(saved["went on"], saved["control"])
        assert not torch.equal(saved["control"]["up.weight"], saved["state"]["up.weight"])


def test_p33_torch_reads_the_same_moments(played: Path) -> None:
    """By torch's own reader, in the layout of its state_dict API."""
    (saved, _) = outcomes(played, "p33_save")
    found = stock(played / "p33_save/place/ck/optimizer_0")["optimizer"]
    assert_same_moments(found["state"], saved["moments"])
    assert sorted(found["param_groups"][0]["params"]) == sorted(NAMES)
    assert found["param_groups"][0]["lr"] == 1e-3


# P34 ------------------------------------------------------------------------------------------------------------------

OPTIONS = ("params", "lr", "initial_lr", "betas", "eps", "weight_decay")
GROUPS = {
    "ours": [  # after one step of a scheduler that halves
        (WEIGHTS, 5e-4, 1e-3, (0.8, 0.95), 1e-8, 0.1),
        (REST, 1e-3, 2e-3, (0.9, 0.999), 1e-8, 0.0),
        ([], 2.5e-4, 5e-4, (0.9, 0.999), 1e-6, 0.01),
    ],
    "stock": [  # without a scheduler
        (WEIGHTS, 1e-3, None, (0.8, 0.95), 1e-8, 0.1),
        (REST, 2e-3, None, (0.9, 0.999), 1e-8, 0.0),
        ([], 5e-4, None, (0.9, 0.999), 1e-6, 0.01),
    ],
}


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_p34_every_group_gets_its_own_options_back(kind: str, played: Path) -> None:
    """pytorch/pytorch#143828, VeOmni#878: also later groups, and one without parameters; on two ranks."""
    for found in outcomes(played, "p34_resume"):
        assert [tuple(group.get(option) for option in OPTIONS) for group in found[kind]] == GROUPS[kind]


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_p34_also_on_one_rank(kind: str, played: Path) -> None:
    """From two ranks to one that knows of no process group; a step works."""
    model = seeded(2)
    optimizer = three_groups(model, fresh=True)
    fsdp_ckpt.load_state(played / "p34_save/place" / kind, model, optimizer)
    found = groups_of(model, optimizer)
    assert [tuple(group.get(option) for option in OPTIONS) for group in found] == GROUPS[kind]
    train(model, optimizer, 2)
    assert all(state["step"] == 2 for state in optimizer.state.values())


# P36 ------------------------------------------------------------------------------------------------------------------


def test_p36_a_parameter_without_a_gradient_starts_fresh(played: Path) -> None:
    """Automodel#2779, torchtitan#4474, pytorch/pytorch#192307: the others are restored, and it is named."""
    for found in outcomes(played, "p36_inactive"):
        assert sorted(found["saved"]) == ["a.bias", "a.weight"]
        assert_same_moments(found["loaded"], found["saved"])
        assert sorted(found["fresh"]) == ["inactive.bias", "inactive.weight"]


def test_p36_a_frozen_parameter_keeps_its_state_or_is_named(played: Path) -> None:
    """pytorch/pytorch#140898: kept while the optimizer has the parameter, named in the report when it has not."""
    for found in outcomes(played, "p36_frozen"):
        assert_trained(found["saved"], 1)
        assert_same_moments(found["kept"], found["saved"])
        rest = {name: state for name, state in found["saved"].items() if name != "up.weight"}
        assert_same_moments(found["left out"], rest)
        report = found["left out report"]
        assert report.optimizer_unused == ["up.weight"]
        assert "up.weight" in "\n".join(report.warnings)
        assert found["kept report"].optimizer_unused == []


def test_p36_gradients_do_not_matter(played: Path) -> None:
    """pytorch/pytorch#192225: all six parameters' state is restored, and the gradients stay."""
    for found in outcomes(played, "p36_gradients"):
        assert_trained(found["saved"], 1)
        assert_same_moments(found["loaded"], found["saved"])
        assert_same(found["after"], found["before"])


def test_p36_no_state_stays_no_state(played: Path) -> None:
    """SGD without momentum, and AdamW before its first step: nothing is invented, old state does not survive."""
    for found in outcomes(played, "p36_stateless"):
        for moment in ("saved", "loaded", "saved before a step", "loaded from before a step"):
            assert found[moment] == {}
        assert found["lr"] == 0.1


# P37 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["index", "name", "flat"])
def test_p37_three_layouts_give_the_same_optimizer(layout: str, played: Path) -> None:
    """accelerate#3971, fla-org/flame#15: by index, by name, flattened; torch's own reader says what is right."""
    expected = stock(played / "p37/place/name")["optimizer"]
    for found in outcomes(played, "p37"):
        moments, groups = found[layout]
        assert sorted(moments) == sorted(NAMES)
        assert all(state["step"] == 2 for state in moments.values())
        assert_same_moments(moments, expected["state"])
        assert [group["params"] for group in groups] == [WEIGHTS, REST]
        for group, saved in zip(groups, expected["param_groups"], strict=True):
            assert {option: value for option, value in group.items() if option != "params"} == {
                option: value for option, value in saved.items() if option != "params"
            }
        assert [group["lr"] for group in groups] == [1e-3, 2e-3]


@pytest.mark.parametrize("layout", ["index", "name", "flat"])
def test_p37_an_optimizer_alone_is_loaded_when_that_is_said(layout: str, played: Path) -> None:
    """The checkpoint has no model: by default that is an error, and with exclude=["*"] the model stays as it is."""
    for found in outcomes(played, "p37"):
        assert found[f"{layout}, strict"].kind == "CheckpointNotFound"
        assert "holds no model" in found[f"{layout}, strict"].message
        assert_same(found[f"{layout}, model"], reference(Mlp()))


def test_p37_an_index_means_nothing_to_another_model(played: Path) -> None:
    """Another number of parameters: refused, as which is which cannot be told."""
    model = torch.nn.Linear(6, 8)
    with pytest.raises(fsdp_ckpt.FsdpCkptError, match="index"):
        fsdp_ckpt.load_state(
            played / "p37/place/index", model, AdamW(model.parameters()), exclude=["*"], strict=False
        )  # fmt: skip


# P39 ------------------------------------------------------------------------------------------------------------------


def assert_resumed(found: Mapping[str, Any], saved: Mapping[str, Any], *, exact: bool) -> None:
    """Fail unless everything is as it was saved, and the next step leads to the same place."""
    assert_same(found["state"], saved["state"])
    assert_same_moments(found["moments"], saved["moments"])
    assert found["groups"] == saved["groups"]
    for name, value in saved["third"].items():
        assert not torch.equal(value, saved["state"][name]), "the step does nothing"
        if exact:
            assert torch.equal(found["third"][name], value)
        else:
            torch.testing.assert_close(found["third"][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "exact"), [("p39_three", False), ("p39_four", True)])
def test_p39_another_number_of_ranks(name: str, exact: bool, played: Path) -> None:
    """pytorch-lightning#16815, torchtitan#811: 2 -> 3 and 2 -> 4; a mean over three ranks rounds, one over four not."""
    (saved, _) = outcomes(played, "p39_save")
    assert_trained(saved["moments"], 2)
    for found in outcomes(played, name):
        assert_resumed(found, saved, exact=exact)


def test_p39_one_process(played: Path) -> None:
    """2 -> 1, without a process group. The step is that of a plain module: other kernels, so up to rounding."""
    (saved, _) = outcomes(played, "p39_save")
    model = seeded(2, 5, 7)
    optimizer = two_groups(model, (9.0, 8.0))
    report = fsdp_ckpt.load_state(played / "p39_save/place/ck", model, optimizer)
    assert (report.saved_world_size, report.world_size, report.step) == (2, 1, 2)
    assert_resumed(resumed(model, optimizer), saved, exact=False)


# P40 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_p40_each_rank_gets_its_position_back(kind: str, played: Path) -> None:
    """torchtitan#816, Megatron-Bridge#5637: exactly, on the number of ranks that saved; nothing to refuse."""
    for rank, found in enumerate(outcomes(played, "p40_four")):
        assert found[f"{kind} refused"] is None
        report, _, states, position = found[kind]
        assert position == {"pos": 10 * (rank + 1)}
        assert (report.data, states) == ("restored", 6)


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize(("name", "ranks"), [("p40_two", 2), ("p40_six", 6)])
def test_p40_other_world_sizes_are_refused(name: str, ranks: int, kind: str, played: Path) -> None:
    """By default: saved for 4, now N; and nothing is loaded, not even the model."""
    found = outcomes(played, name)
    assert len(found) == ranks
    for one in found:
        error = one[f"{kind} refused"]
        assert error.kind == "Incompatible"
        assert f"saved for 4 ranks, now there are {ranks}" in error.message
        state, num_moments, position = one[f"{kind} after that"]
        assert all(bool((value == -1).all()) for value in state.values())
        assert (num_moments, position) == (0, {"pos": -1})


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("name", ["p40_two", "p40_six"])
def test_p40_the_rest_is_loaded_on_request(name: str, kind: str, played: Path) -> None:
    """With positions="fresh": model and optimizer, loaders at their beginning, and the report says so."""
    saved = stock(played / "p40_save/place" / ("stock" if kind == "stock" else "ours/pytorch_model_fsdp_0"))["model"]
    for found in outcomes(played, name):
        report, state, num_moments, position = found[kind]
        assert_same(state, saved)
        assert (num_moments, position) == (6, {"pos": -1})
        assert "saved for 4 ranks" in report.data
        assert report.data in report.warnings


# P41, P42 -------------------------------------------------------------------------------------------------------------


def test_p41_each_rank_goes_on_with_its_own_streams(played: Path) -> None:
    """RLinf#1570, miles#3187, Automodel#3437, Megatron-LM#6858: Python's, NumPy's and torch's, in new processes."""
    saved = outcomes(played, "p41_save")
    assert len({str(numbers) for numbers in saved}) == 4, "the ranks draw alike: the test would compare nothing"
    for rank, numbers in enumerate(saved):  # what the seeds mean, without us
        python = random.Random(100 + rank)
        assert numbers[0] == [python.random() for _ in range(3)]
        assert numbers[1] == list(np.random.RandomState(200 + rank).rand(3))
        assert numbers[2] == torch.rand(3, generator=torch.Generator().manual_seed(300 + rank)).tolist()
    for expected, (report, numbers) in zip(saved, outcomes(played, "p41_four"), strict=True):
        assert numbers == expected
        assert report.rng == "restored"
        assert report.warnings == []


def test_p41_fewer_ranks_get_their_own_and_a_warning(played: Path) -> None:
    """4 -> 2: ranks 0 and 1 get theirs; the warning names both world sizes."""
    for expected, (report, numbers) in zip(outcomes(played, "p41_save"), outcomes(played, "p41_two"), strict=False):
        assert numbers == expected
        (warning,) = report.warnings
        assert "of 4 ranks were saved, now there are 2" in warning


TRAINER = {"python": "python", "numpy": "numpy", "cpu": "cpu"}
ACCELERATE = {"python": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}


def write_random_states(file: Path, names: Mapping[str, str], *, numpy_1: bool, **more: Any) -> list[list[float]]:
    """Save this process's random states, with NumPy 1's or 2's names in the pickle; return what it draws next."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save({**{names[kind]: value for kind, value in state.items()}, **more}, file)
    if numpy_1:
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, data in records.items():
                archive.writestr(name, data.replace(b"numpy._core.", b"numpy.core."))
    core = {name.split()[0] for name in pickled_globals(file) if "multiarray" in name}
    assert core == {f"numpy.{'core' if numpy_1 else '_core'}.multiarray"}
    return draw()


@pytest.mark.parametrize("numpy_1", [True, False], ids=["numpy1", "numpy2"])
@pytest.mark.parametrize(("name", "names"), [("rng_state_0.pth", TRAINER), ("random_states_0.pkl", ACCELERATE)])
def test_p42_the_streams_of_others_go_on(
    name: str, names: Mapping[str, str], numpy_1: bool, built: Path, tmp_path: Path
) -> None:
    """huggingface/transformers#40500, #34631: the Trainer's and Accelerate's files; all three streams exactly."""
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(built / "p22", folder)
    random.seed(40)
    np.random.seed(41)
    torch.manual_seed(42)
    expected = write_random_states(folder / name, names, numpy_1=numpy_1)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert draw() != expected
    model = blank(Mlp())
    report = fsdp_ckpt.load_state(folder, model, rng=True)
    assert draw() == expected
    assert report.rng == "restored"
    assert_same(reference(model), reference(Mlp()))


@pytest.mark.parametrize(("name", "names"), [("rng_state_0.pth", TRAINER), ("random_states_0.pkl", ACCELERATE)])
def test_p42_any_other_global_is_refused(
    name: str, names: Mapping[str, str], built: Path, tmp_path: Path
) -> None:  # fmt: skip
    """By name, without running it; the model and the streams stay as they are."""
    folder, mark = tmp_path / "checkpoint-1", tmp_path / "MARK"
    shutil.copytree(built / "p22", folder)
    write_random_states(folder / name, names, numpy_1=False, x=Touch(mark))
    model, state = blank(Mlp()), random.getstate()
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        fsdp_ckpt.load_state(folder, model, rng=True)
    assert not mark.exists()
    assert random.getstate() == state
    assert all((value == -1).all() for value in model.state_dict().values())
    torch.load(folder / name, weights_only=False)
    assert mark.exists(), "the file does not do what this test is about"


def test_p42_all_streams_or_none(built: Path, tmp_path: Path) -> None:
    """A file that lacks one of them is refused; the others are not restored behind its back."""
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(built / "p22", folder)
    torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / "rng_state_0.pth")
    random.seed(1)
    state = random.getstate()
    with pytest.raises(MalformedFile, match="numpy"):
        fsdp_ckpt.load_state(folder, Mlp(), rng=True)
    assert random.getstate() == state


# P43, P44 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before, goes on", "before, anew", "after"])
def test_p43_the_learning_rate_goes_on(order: str, played: Path) -> None:
    """speculators#1048, nanotron#256, gpt-neox#1029: loaded before the scheduler exists, and after."""
    for found in outcomes(played, "p43"):
        assert found["saved"] == 1.25e-4
        assert found.get(f"{order}: loaded", [1.25e-4, 1e-3]) == [1.25e-4, 1e-3]
        assert found[order] == [1.25e-4, 1e-3, [1e-3], 6.25e-5]


def test_p43_both_orders_were_played(played: Path) -> None:
    """The default in the test above is for the second one only."""
    for found in outcomes(played, "p43"):
        assert {"before, goes on: loaded", "before, anew: loaded"} <= found.keys()


@pytest.mark.parametrize("layout", ["old", "new"])
def test_p44_one_blob_or_flattened_is_the_same(layout: str, played: Path) -> None:
    """pytorch/pytorch#133923, composer#3565, #3252: groups and extra, as torch's own reader gives them."""
    folder = played / "p44/place"
    for found in outcomes(played, "p44"):
        expected = stock(folder / "new")
        assert expected["extra"] == {"l": [1, {"x": 2}]}
        state, moments, groups, extra = found[layout]
        assert_same(state, reference(Mlp()))
        assert_same_moments(moments, expected["optim"]["state"])
        (group,) = groups
        (saved,) = expected["optim"]["param_groups"]
        assert sorted(group.pop("params")) == sorted(saved.pop("params")) == sorted(NAMES)
        assert group == saved
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0.01)
        assert extra == {"l": [1, {"x": 2}]}


@pytest.mark.parametrize(("layout", "is_blob"), [("old", True), ("new", False)])
def test_p44_the_two_layouts_differ(layout: str, is_blob: bool, played: Path) -> None:
    """The recipe makes what it says."""
    keys = FileSystemReader(played / "p44/place" / layout).read_metadata().state_dict_metadata.keys()
    assert ("extra" in keys, "optim.param_groups" in keys) == (is_blob, is_blob)
    assert ("extra.l.0" in keys, "optim.param_groups.0.lr" in keys) == (not is_blob, not is_blob)


def test_p44_our_own_objects_keep_their_nesting(tmp_path: Path) -> None:
    """The twin that save_state writes."""
    state = {"l": [1, {"x": 2}], "t": (1, "é"), "empty": {}, "tensor": torch.arange(3)}
    fsdp_ckpt.save_state(tmp_path / "ck", Mlp(), objects={"extra": Position(state)})
    extra = Position()
    fsdp_ckpt.load_state(tmp_path / "ck", objects={"extra": extra})
    assert torch.equal(extra.state.pop("tensor"), state.pop("tensor"))  # type: ignore[arg-type]
    assert extra.state == state
