"""The pages about findings are those of the table, and the table has every kind that the code can report."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fsdp_ckpt.catalog import Severity
from fsdp_ckpt.findings import KINDS, content, files, fit, geometry, state
from fsdp_ckpt.layouts import faults

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/findings"
TABLES = (files, geometry, content, state, fit)
MODULES = [
    *sorted((ROOT / "fsdp_ckpt/layouts").glob("*.py")), *sorted((ROOT / "fsdp_ckpt/ops/validation").glob("*.py")),
    ROOT / "fsdp_ckpt/ops/validate.py",
]  # fmt: skip
# The argument that names a kind, by its place where it is not given by name.
MAKERS: dict[str, int | None] = {"Problem": None, "finding": 0, "replace": None}

NOT_YET: set[str] = set()
"""In the table, reported by nothing."""


def test_pages_are_fresh() -> None:
    rendered = runpy.run_path(str(ROOT / "docs/make_findings.py"))["render"]()
    found = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert found == rendered, "run: python docs/make_findings.py"


def test_every_kind_is_in_the_list_and_links_lead_somewhere() -> None:
    index = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| `([^`]+)` \|", index, re.MULTILINE) == [
        (kind.code, kind.name) for kind in KINDS.values()
    ]
    for path in FOLDER.iterdir():
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (FOLDER / target).is_file(), (path.name, target)


def test_tables_keep_their_order_and_no_number_is_used_twice() -> None:
    kinds = [kind for table in TABLES for kind in table.KINDS]
    codes = [kind.code for kind in kinds]
    assert all(re.fullmatch(r"[EWN]\d{3}", code) for code in codes)
    numbers = [int(code[1:]) for code in codes]
    assert numbers == sorted(set(numbers))
    assert list(KINDS.values()) == kinds  # no name hides another one
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9.]+)*", name) for name in KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_says_all_that_people_need(name: str) -> None:
    kind = KINDS[name]
    assert not kind.title.endswith(".")
    for sentence in (kind.meaning, kind.causes, kind.fix):
        assert sentence.endswith("."), sentence
    if kind.command:
        words = shlex.split(kind.command.format(path="PATH", parent="PARENT"))
        assert words[0] in ("fsdp-ckpt", "ls")
        assert {"PATH", "PARENT"} & set(words)


def test_every_kind_that_is_reported_is_in_the_table() -> None:
    used = {name: where for path in MODULES for name, where in _codes(path)}
    assert len(used) > 30, "the search has lost its way"
    assert {name: where for name, where in used.items() if name not in KINDS} == {}


def test_every_kind_is_reported_by_something() -> None:
    sources = [path.read_text() for path in (ROOT / "fsdp_ckpt").rglob("*.py") if path.parent.name != "findings"]
    assert {name for name in KINDS if not any(f'"{name}"' in source for source in sources)} == NOT_YET


def test_kinds_of_exceptions_are_in_the_table() -> None:
    assert set(KINDS) >= faults.DAMAGE | {faults.UNREADABLE, *faults._FAULTS.values()}


@pytest.mark.parametrize("severity", Severity)
def test_the_letter_is_the_severity(severity: Severity) -> None:
    letters = {Severity.ERROR: "E", Severity.WARNING: "W", Severity.NOTE: "N"}
    kinds = [kind for kind in KINDS.values() if kind.severity is severity]
    assert kinds
    assert {kind.code[0] for kind in kinds} == {letters[severity]}


def _codes(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kinds that a module's source names where it makes a problem, each with its line."""
    tree = ast.parse(path.read_text())
    makers = MAKERS | {
        node.name: [argument.arg for argument in node.args.args].index("code")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(argument.arg == "code" for argument in node.args.args)
    }
    constants = _assigned(tree.body)
    for scope in tree.body:
        texts = constants | _assigned(ast.walk(scope))
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
                place = makers[node.func.id]
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if place is not None:
                    given += node.args[place : place + 1]
                for value in given:
                    names = [inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name)]
                    for text in [*_texts(value), *(text for name in names for text in texts.get(name, []))]:
                        yield text, f"{path.name}:{node.lineno}"


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, list[str]]:
    """Return the texts that simple names stand for."""
    return {
        target.id: _texts(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _texts(value: ast.expr) -> list[str]:
    return [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
