"""All kinds of findings: the one table that ``validate`` and its documentation are made from.

Readers and checks name a kind by its words (``Problem.code``); people see its code, too, which is stable.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_ckpt.findings import content, files, fit, geometry, state
from fsdp_ckpt.findings.kind import Kind

__all__ = ["KINDS", "Kind"]

KINDS: Mapping[str, Kind] = {
    kind.name: kind for table in (files, geometry, content, state, fit) for kind in table.KINDS
}
"""Kinds by name, in the order of their numbers."""
