from __future__ import annotations

import shlex

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
    assert shlex.split(one.next) == ["fsdp-ckpt", "repair", path]
    assert as_findings([_problem("path-outside")], path)[0].next == ""


def test_what_is_about_everything_has_a_dot() -> None:
    (one,) = as_findings([_problem("no-tensors", "")], "p")
    assert one.where == "."
    assert one.meaning == KINDS["no-tensors"].meaning
