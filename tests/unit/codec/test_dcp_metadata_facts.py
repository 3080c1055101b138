"""What ``.metadata`` files say besides tensors, as torch's own classes and Python's disassembler see them."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest

from fsdp_ckpt.codec import dcp_metadata
from fsdp_ckpt.codec.dcp_metadata_facts import read_facts
from fsdp_ckpt.errors import MalformedFile, UnsafePickle
from tests.unit.codec.test_dcp_metadata import FILES, FIXTURES, FOREIGN, NEWER


def _globals(data: bytes) -> set[str]:
    """Return what a pickle imports; texts that come from the memo are resolved by playing the memo."""
    found, memo, texts = set(), list[object](), list[object]()
    for code, argument, _ in pickletools.genops(data):
        if code.name == "MEMOIZE":
            memo.append(texts[-1] if texts else None)
        elif code.name in ("BINGET", "LONG_BINGET"):
            texts.append(memo[int(argument or 0)])
        elif code.name == "GLOBAL":
            found.add(str(argument).replace(" ", "."))
            texts.append(None)
        elif code.name == "STACK_GLOBAL":
            found.add(".".join(map(str, texts[-2:])))
            texts.append(None)
        elif code.name == "SHORT_BINUNICODE":
            texts.append(argument)
        elif code.name not in ("FRAME", "PROTO"):
            texts.append(None)
    return found


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_files_of_torch(path: Path, bulk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "_BULK_BYTES", 0 if bulk else 1 << 40)
    data = path.read_bytes()
    facts = read_facts(data, where="f")
    assert facts.globals == _globals(data)
    assert facts.fields == (6 if "torch215" in str(path) else 5 if b"TensorProperties" in data else 0)
    if not {*NEWER, *FOREIGN} & set(path.parts):
        meta = getattr(pickle.loads(data), "storage_meta", None)
        assert facts.save_id == (None if meta is None else meta.save_id)


def test_what_is_no_metadata() -> None:
    with pytest.raises(MalformedFile):
        read_facts(pickle.dumps({"state_dict_metadata": 3}), where="f")
    with pytest.raises(MalformedFile):
        read_facts(b"", where="f")
    with pytest.raises(UnsafePickle):
        read_facts(b"cos\nsystem\n.", where="f")
