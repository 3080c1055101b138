"""Write docs/findings/: a page for every kind of finding and a list of all, from the table that `validate` follows."""

import os
import sys
from pathlib import Path

from fsdp_ckpt.catalog import Severity
from fsdp_ckpt.findings import KINDS, Kind

FOLDER = Path(__file__).parent / "findings"
SAMPLE = "run/checkpoint-2000"

_SEVERITIES = {
    Severity.ERROR: "Error: something is lost, wrong or does not fit; `validate` exits with 1.",
    Severity.WARNING: "Warning: somebody should know; `validate --strict` exits with 1.",
    Severity.NOTE: "Note: a fact that helps to understand the checkpoint.",
}
_GROUPS = {
    1: "1xx: what lies on disk, and what should",
    2: "2xx: whether shards make up tensors",
    3: "3xx: the bytes, and the numbers in them",
    4: "4xx: names",
    5: "5xx: the state of the training",
    6: "6xx: indices",
    7: "7xx: what a version of torch or Python needs",
    8: "8xx: what it is to be loaded into",
}

_HEAD = """# Findings

Written by `docs/make_findings.py` from `fsdp_ckpt.findings`; do not edit it by hand.

What `fsdp-ckpt validate` may say about a checkpoint, and `inspect` in part. The letter tells how bad a finding usually
is: E error, W warning, N note; a single one may be judged otherwise. Codes and names never change their meaning.
"""


def render() -> dict[str, str]:
    """Return the pages by file name."""
    pages = {"README.md": _index()}
    pages |= {f"{kind.code}.md": _page(kind) for kind in KINDS.values()}
    return pages


def _index() -> str:
    parts = [_HEAD]
    for number, title in _GROUPS.items():
        kinds = [kind for kind in KINDS.values() if kind.code[1] == str(number)]
        rows = [f"| [{kind.code}]({kind.code}.md) | `{kind.name}` | {kind.title} | {kind.meaning} |" for kind in kinds]
        parts.append(
            "\n".join([f"## {title}\n", "| code | name | title | meaning |", "|---|---|---|---|", *rows]) + "\n"
        )
    return "\n".join(parts)


def _page(kind: Kind) -> str:
    parts = [
        f"# {kind.code} {kind.name}\n",
        f"**{kind.title}.**\n",
        f"{_SEVERITIES[kind.severity]}\n",
        f"## What it means\n\n{kind.meaning}\n",
        f"## How it comes about\n\n{kind.causes}\n",
        f"## What to do\n\n{kind.fix}\n",
    ]
    if kind.command:
        parts.append(f"```console\n$ {kind.command.format(path=SAMPLE, parent=os.path.dirname(SAMPLE))}\n```\n")
    parts.append("[All findings](README.md)\n")
    return "\n".join(parts)


def main() -> None:
    """Write all pages; remove those of kinds that are no more."""
    FOLDER.mkdir(exist_ok=True)
    pages = render()
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)
    sys.stdout.write(f"wrote {len(pages)} pages in {FOLDER.name}/\n")


if __name__ == "__main__":
    main()
