"""Names that try to act on a terminal, a table or a file: shown escaped, kept exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.tool import assert_refused, tensors
from tests.hostile.forge_dcp import Forged, pattern
from tests.hostile.forge_zip import saved, tensor_value
from tests.hostile.places import assert_harmless
from tests.hostile.sandbox import Case, Outcome, Sandbox

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

NAMES = {
    "colour": "layers.0.\x1b[31mred\x1b[0m.weight",
    "title": "layers.0.\x1b]0;owned\x07.weight",
    "clear": "layers.\x1b[2J\x1b[H.weight",
    "eight-bit-csi": "layers.\x9b31m.weight",
    "bell-and-back": "layers.\x07\x08\x08\x08.weight",
    "carriage-return": "layers.0\rerror: none.weight",
    "newline": "layers.0\nerror: all is well\n.weight",
    "tab": "layers\t0\t.weight",
    "nul": "layers.\x00.weight",
    "delete": "layers.\x7f.weight",
    "right-to-left": "layers.\u202egpj.thgiew\u202c",
    "isolate": "layers.\u2066x\u2069.weight",
    "zero-width": "lay\u200bers.weight",
    "line-separator": "layers.\u2028x.weight",
    "byte-order-mark": "\ufefflayers.weight",
    "markup": "layers.[bold red]0[/bold red].weight",
    "markup-closing": "layers[/y].weight",
    "markup-link": "[link=http://example.org]layers[/link].weight",
    "markup-escaped": "layers.\\[bold].weight",
    "emoji-code": "layers.:warning:.weight",
    "percent": "layers.%s%n%(x)s{0}{}.weight",
    "html": "<script>alert(1)</script>.weight",
    "quotes": "layers.\"'`$(touch x)`;&|.weight",
    "spaces": " layers . 0 .weight ",
    "wide": "層.零.重み",
    "combining": "l" + "\u0301" * 500 + ".weight",
    "dots": "....",
    "dots-and-numbers": ".0.1..2.",
    "numbers": "0.00.000.weight",
    "large-numbers": f"layers.{10**30}.weight",
    "other-digits": "layers.\u0663.\u00b2.weight",
    "path": "../../../etc/passwd",
    "slash": "/layers/0/weight",
    "braces": "layers.{0..31}.weight",
    "dunder": "__proto__.weight",
    "like-metadata": "__metadata__x",
    "underscore": "_",
    "wrapper": "_orig_mod",
    "long": "layers." + "n" * 100_000,
    "many-dots": ".".join("abc"[n % 3] for n in range(20_000)),
}


def _views(sandbox: Sandbox, path: Path) -> list[Outcome]:
    flags: list[list[str]] = [[], ["--tree"], ["--tensors", "*"], ["--shards"], ["--objects"], ["--json", "--objects"]]
    return sandbox.many(Case(argv=["inspect", str(path), *extra]) for extra in flags)


def _assert_calm(text: str) -> None:
    found = CONTROL.search(text)
    assert found is None, f"{found[0]!r} in {text[max(found.start() - 40, 0) : found.start() + 40]!r}"


@pytest.mark.parametrize("name", NAMES)
def test_a_strange_name_is_shown_escaped_and_kept_exactly(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    key = NAMES[name]
    forged = Forged()
    forged.tensor(key, (2, 2))
    forged.tensor("plain.weight", (2,))
    forged.item(f"object.{key}", saved({key: [key]}))
    path = forged.write(tmp_path / "ckpt")

    *views, shown = _views(sandbox, path)
    for outcome in views:
        assert_harmless(outcome, tmp_path)
        assert outcome.code == 0, outcome.err
        _assert_calm(outcome.out + outcome.err)
    report = json.loads(shown.out)
    assert key in {tensor["name"] for part in report["parts"] for tensor in part["tensors"]}

    outcome = sandbox.run("merge", path, tmp_path / "out")
    assert_harmless(outcome, tmp_path)
    assert outcome.code == 0, outcome.err
    _assert_calm(outcome.out + outcome.err)
    assert tensors(tmp_path / "out") == {key: ("F32", (2, 2), pattern(16)), "plain.weight": ("F32", (2,), pattern(8))}

    again = sandbox.run("inspect", tmp_path / "out", "--json")
    assert key in {tensor["name"] for tensor in json.loads(again.out)["parts"][0]["tensors"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_strange_name_in_a_message_is_escaped_and_cut(name: str, tmp_path: Path, sandbox: Sandbox) -> None:
    key = NAMES[name]
    forged = Forged()
    forged.tensor(key, (2, 2))
    path = forged.write(tmp_path / "ckpt")
    item = bytearray((path / "__0_0.distcp").read_bytes())
    at = item.index(pattern(16))
    item[at] ^= 1
    (path / "__0_0.distcp").write_bytes(item)
    outcome = sandbox.run("merge", path, tmp_path / "out")
    assert_harmless(outcome, tmp_path)
    assert_refused(outcome, 4)
    _assert_calm(outcome.err)
    assert len(outcome.err.splitlines()) <= 3  # a newline in a name makes no line


@pytest.mark.parametrize("key", ["\ud800", "layers.\udfff.weight"])
def test_a_name_that_is_no_text_is_refused(key: str, tmp_path: Path, sandbox: Sandbox) -> None:
    """Half of a surrogate pair cannot be written as UTF-8, which safetensors and JSON demand."""
    forged = Forged()
    forged.tensor(key, (2, 2))
    path = forged.write(tmp_path / "ckpt")
    full = tmp_path / "full"
    full.mkdir()
    (full / "pytorch_model.bin").write_bytes(saved({key: tensor_value((2, 2))}, [bytes(16)]))
    looks: list[list[str]] = [[], ["--tree"], ["--json"]]
    for source in (path, full):
        for flags in looks:
            outcome = sandbox.run("inspect", source, *flags)
            assert_harmless(outcome, tmp_path)
            assert outcome.code in (0, 4), outcome.err
        outcome = sandbox.run("merge", source, tmp_path / "out")
        assert_harmless(outcome, tmp_path)
        assert_refused(outcome, 4, 8)
        assert not (tmp_path / "out").exists()


def test_names_that_only_look_alike_stay_apart(tmp_path: Path, sandbox: Sandbox) -> None:
    forged = Forged()
    names = ["a.b", "a\u200b.b", "\u0430.b", "a.b ", "A.b"]
    for name in names:
        forged.tensor(name, (2,))
    path = forged.write(tmp_path / "ckpt")
    assert sandbox.run("merge", path, tmp_path / "out").code == 0
    assert set(tensors(tmp_path / "out")) == set(names)
