from __future__ import annotations

import pickle
import re

import pytest

from fsdp_ckpt import errors

# Exit codes are those of DESIGN.md section 7; stdlib cousins those of the tree in the module's docstring.
TREE: dict[str, tuple[str, int, type[BaseException]]] = {
    "UsageError": ("FsdpCkptError", 2, ValueError),
    "AmbiguousPart": ("UsageError", 2, ValueError),
    "CheckpointNotFound": ("FsdpCkptError", 3, FileNotFoundError),
    "UnknownLayout": ("CheckpointNotFound", 3, FileNotFoundError),
    "NoModelWeights": ("CheckpointNotFound", 3, FileNotFoundError),
    "CorruptCheckpoint": ("FsdpCkptError", 4, ValueError),
    "IncompleteCheckpoint": ("CorruptCheckpoint", 4, ValueError),
    "NotPermitted": ("IncompleteCheckpoint", 4, ValueError),
    "ChecksumMismatch": ("CorruptCheckpoint", 4, ValueError),
    "MalformedFile": ("CorruptCheckpoint", 4, ValueError),
    "ItemMismatch": ("MalformedFile", 4, ValueError),
    "PathOutside": ("MalformedFile", 4, ValueError),
    "UnsafePickle": ("CorruptCheckpoint", 4, ValueError),
    "DestinationExists": ("FsdpCkptError", 5, FileExistsError),
    "NotEnoughSpace": ("FsdpCkptError", 6, OSError),
    "Unreachable": ("FsdpCkptError", 7, ConnectionError),
    "Incompatible": ("FsdpCkptError", 8, ValueError),
    "FlatParameters": ("Incompatible", 8, ValueError),
    "NameCollision": ("Incompatible", 8, ValueError),
    "StateMismatch": ("Incompatible", 8, ValueError),
    "RankFailed": ("FsdpCkptError", 70, RuntimeError),
    "Vetoed": ("FsdpCkptError", 70, RuntimeError),
}


def test_the_table_above_is_the_whole_tree() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == {"FsdpCkptError", *TREE}
    assert set(errors.__all__) == classes


@pytest.mark.parametrize("name", TREE)
def test_parent_exit_code_and_stdlib_cousin(name: str) -> None:
    parent, exit_code, cousin = TREE[name]
    found = getattr(errors, name)
    assert issubclass(found, getattr(errors, parent))
    assert issubclass(found, cousin)
    assert found.exit_code == exit_code


def test_what_was_not_foreseen_has_its_own_exit_code() -> None:
    assert errors.FsdpCkptError.exit_code == 70


def test_the_docstring_draws_every_class_with_its_code_under_its_parent() -> None:
    lines = re.findall(r"^    ([ │├└─]*)(\w+)\s+(\d+)  ", errors.__doc__ or "", re.MULTILINE)
    ancestors: list[str] = []
    drawn = {}
    for indent, name, code in lines:
        depth = len(indent) // 4
        ancestors[depth:] = [name]
        drawn[name] = (ancestors[depth - 1] if depth else None, int(code))
    expected: dict[str, tuple[str | None, int]] = {name: (parent, code) for name, (parent, code, _) in TREE.items()}
    assert drawn == expected | {"FsdpCkptError": (None, 70)}


@pytest.mark.parametrize("name", sorted({"FsdpCkptError", *TREE} - {"UnsafePickle"}))
def test_message_and_hint(name: str) -> None:
    found = getattr(errors, name)
    error = found("`x` is gone", hint="fsdp-ckpt inspect x")
    assert str(error) == error.message == "`x` is gone"
    assert error.hint == "fsdp-ckpt inspect x"
    assert found("`x` is gone").hint is None


def test_an_unsafe_pickle_names_the_global_and_the_place() -> None:
    error = errors.UnsafePickle("os.system", where="__0_0.distcp (`w`)")
    assert error.name == "os.system"
    assert "`os.system`" in str(error)
    assert "__0_0.distcp (`w`)" in str(error)


def test_os_errors_keep_their_message() -> None:
    # OSError.__new__ turns two arguments into errno and strerror; ours has one message.
    error = errors.DestinationExists("`out` is not empty", hint="choose another")
    assert str(error) == "`out` is not empty"
    assert error.errno is None


@pytest.mark.parametrize("name", TREE)
def test_errors_pass_between_processes(name: str) -> None:
    found = getattr(errors, name)
    error = found("os.system", where="x") if name == "UnsafePickle" else found("what", hint="then")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is found
    assert (str(again), again.hint) == (str(error), error.hint)
