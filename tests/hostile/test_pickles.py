"""Pickles of strangers: no code is run, whatever they say and wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.tool import assert_refused
from tests.hostile.attacks import chain_attacks, code_attacks, memory_attacks
from tests.hostile.places import FEW, assert_harmless, commands, model_places, object_places
from tests.hostile.sandbox import Sandbox


@pytest.mark.parametrize("name", code_attacks("/nowhere"))
def test_a_pickle_that_asks_for_code_is_refused_by_name(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    canary, out = tmp_path / "canary", tmp_path / "out"
    pickle, needs = code_attacks(str(canary))[name]
    places = model_places(tmp_path / "ckpt", pickle, None if name.startswith(("posix", "python")) else FEW)
    outcomes = iter(sandbox.many(commands(places, out)))
    for place in places:
        for command in ("inspect", "merge"):
            outcome = next(outcomes)
            assert_harmless(outcome, tmp_path)
            if command == "merge":
                assert outcome.digest is None, place.name
            if command == "inspect" and not place.read_by_inspect:
                assert outcome.code == 0, place.name
            else:
                assert_refused(outcome, 4)
                assert needs.replace("\0", "\\x00") in outcome.err, (place.name, outcome.err)
    assert not canary.exists()


@pytest.mark.parametrize("name", code_attacks("/nowhere"))
def test_objects_of_unknown_classes_are_shown_as_opaque(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    canary, out = tmp_path / "canary", tmp_path / "out"
    pickle, needs = code_attacks(str(canary))[name]
    dcp, accelerate = object_places(tmp_path / "ckpt", pickle)
    shown, merged, other, also_merged = sandbox.many(commands([dcp, accelerate], out, "--objects", "--json"))
    for outcome in (shown, merged, other, also_merged):
        assert outcome.code == 0, outcome.err
        assert_harmless(outcome, tmp_path)
    assert merged.digest == also_merged.digest is not None
    assert not canary.exists()
    texts = {"dcp": [json.dumps(part["objects"]) for part in json.loads(shown.out)["parts"] if part["objects"]]}
    texts["accelerate"] = [json.dumps(part["objects"]) for part in json.loads(other.out)["parts"] if part["objects"]]
    assert len(texts["dcp"]) == 1
    assert len(texts["accelerate"]) == 5
    wanted = json.dumps(needs)[1:-1]
    for text in texts["dcp"] + texts["accelerate"]:
        is_text_protocol = name == "python-protocol-0" and "<unreadable: " in text
        assert f"<opaque: needs {wanted}>" in text or f"<class {wanted}>" in text or is_text_protocol, text


@pytest.mark.parametrize("name", chain_attacks("/nowhere"))
def test_climbing_from_allowed_names_leads_nowhere(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    canary, out = tmp_path / "canary", tmp_path / "out"
    pickle = chain_attacks(str(canary))[name]
    places = model_places(tmp_path / "ckpt", pickle, FEW)
    hidden = object_places(tmp_path / "objects", pickle)
    cases = [*commands(places, out), *commands(hidden, out, "--objects", "--json")]
    outcomes = sandbox.many(cases)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert_harmless(outcome, tmp_path)
        if case.argv[1].startswith(str(tmp_path / "objects")):
            assert outcome.code == 0, outcome.err
        elif case.argv[0] == "merge" or ".metadata" in case.argv[1] or case.argv[1].endswith("metadata"):
            assert_refused(outcome, 3, 4)
            assert outcome.digest is None
        else:
            assert outcome.code in (0, 3, 4), outcome.err
    assert not canary.exists()


@pytest.mark.parametrize("name", memory_attacks())
def test_a_broken_or_greedy_pickle_is_refused_early(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    out = tmp_path / "out"
    attack = memory_attacks()[name]
    places = model_places(tmp_path / "ckpt", attack, FEW if len(attack) < 50_000 else ("metadata", "full-file"))
    cases = commands(places, out)
    for case, outcome in zip(cases, sandbox.many(cases, timeout_s=20), strict=True):
        assert_harmless(outcome, tmp_path)
        if case.argv[0] == "merge" or case.argv[1].endswith(("metadata", "no_collectives")):
            assert_refused(outcome, 3, 4)
            assert outcome.digest is None
        else:
            # A .bin that holds no tensors is no error to look at.
            assert outcome.code in (0, 3, 4), outcome.err


@pytest.mark.parametrize("name", memory_attacks())
def test_a_greedy_object_is_shown_in_part_or_not_at_all(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    attack = memory_attacks()[name]
    places = object_places(tmp_path / "ckpt", attack)[: 2 if len(attack) < 50_000 else 1]
    cases = commands(places, tmp_path / "out", "--objects", "--json")
    outcomes = sandbox.many(cases, timeout_s=20)
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.code == 0, (case.argv, outcome.err)
        assert_harmless(outcome, tmp_path)
        assert len(outcome.out) < 100_000, f"{len(outcome.out)} characters"
        if case.argv[0] == "inspect":
            assert json.loads(outcome.out)["schema"] == "fsdp-ckpt/inspect/1"
        else:
            assert outcome.digest is not None
