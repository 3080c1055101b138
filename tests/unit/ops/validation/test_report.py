from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.catalog import Problem, Severity
from fsdp_ckpt.findings import KINDS
from fsdp_ckpt.ops.validation.report import as_findings


def _problem(code: str, where: str = "x", severity: Severity | None = None) -> Problem:
    return Problem(severity=severity or KINDS[code].severity, code=code, where=where, message="m")


def test_errors_come_first_and_each_once() -> None:
    problems = [
        _problem("no-checksums"), _problem("stale-file"), _problem("wrong-checksum"), _problem("missing-file"),
        _problem("stale-file"), _problem("stale-file", "y"),
    ]  # fmt: skip
    found = as_findings(problems, "p")
    assert [(one.severity, one.code, one.where) for one in found] == [
        ("error", "E102", "x"), ("error", "E301", "x"), ("warning", "W113", "x"), ("warning", "W113", "y"),
        ("note", "N304", "x"),
    ]  # fmt: skip


def test_a_finding_may_be_judged_otherwise() -> None:
    """The code stays the same."""
    (one,) = as_findings([_problem("unsafe-pickle", severity=Severity.WARNING)], "p")
    assert (one.severity, one.code, one.name) == ("warning", "E111", "unsafe-pickle")


def test_the_next_command_can_be_pasted_into_a_shell() -> None:
    path = "a b/$(touch x)/c'd"
    (one,) = as_findings([_problem("missing-file")], path)
    assert shlex.split(one.next) == ["fsdp-ckpt", "repair", path, "--replica", "BACKUP"]
    assert as_findings([_problem("shard-overlap")], path)[0].next == ""
    (values,) = as_findings([_problem("nan-values")], path)
    assert shlex.split(values.next) == ["fsdp-ckpt", "list", str(Path("a b/$(touch x)").absolute())]
    assert as_findings([_problem("missing-metadata")], "-dash")[0].next == "fsdp-ckpt repair ./-dash"


def test_causes_come_before_what_follows_from_them() -> None:
    found = as_findings([_problem("missing-shard"), _problem("all-zero"), _problem("missing-rank")], "p")
    assert [one.code for one in found] == ["E106", "E101", "W312"]


def test_a_file_is_said_to_be_missing_once() -> None:
    missing, wrong = _problem("missing-file", "a"), _problem("header-mismatch", "t")
    said_again = [replace(missing, message="in other words"), replace(wrong, message="of another file")]
    found = as_findings([missing, _problem("missing-file", "b"), wrong, *said_again], "p")
    assert [(one.code, one.where) for one in found] == [("E102", "a"), ("E102", "b"), ("E204", "t"), ("E204", "t")]


def test_what_is_about_everything_has_a_dot() -> None:
    (one,) = as_findings([_problem("no-tensors", "")], "p")
    assert one.where == "."
    assert one.meaning == KINDS["no-tensors"].meaning
