"""The six floors of DESIGN.md section 2, read from the source: imports point down, and modules stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdp_ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "errors": 1,
    "store": 2, "catalog": 2, "config": 2, "names": 2, "units": 2,
    "codec": 3, "plan": 3, "findings": 3,
    "layouts": 4, "run": 4,
    "ops": 5, "train": 5,
    "cli": 6,
}  # fmt: skip
TERMINAL = {"rich", "typer", "click"}
# Only the view, when it is asked for torch tensors, what asks transformers about a model, and training.
TORCH = {"torch", "accelerate", "transformers"}
TORCH_ALLOWED = {"ops/conversion/hf_conversions.py", "ops/conversion/meta_model.py", "ops/view.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room(path: Path) -> str:
    """Return the sub-package or module that a file is in or is."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield module, line, and whether it is only for type checkers; also of imports within functions."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in for_types
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                # ``from fsdp_ckpt import x`` may import a module
                yield (
                    f"{node.module}.{alias.name}" if node.module == "fsdp_ckpt" else node.module,
                    node.lineno,
                    id(node) in for_types,
                )


def test_the_walk_finds_what_it_looks_for() -> None:
    found = {module: for_types for module, _, for_types in imports(PACKAGE / "ops" / "view.py")}
    assert found["torch"] is False, "an import within a function"
    assert found["fsdp_ckpt.run.gather"] is False
    assert found["numpy"] in (True, False)
    assert [for_types for module, _, for_types in imports(PACKAGE / "__init__.py") if module.startswith("fsdp_ckpt")]


def test_every_module_has_a_floor() -> None:
    rooms = {room(path) for path in MODULES} - {"__init__", "__main__"}
    assert rooms <= set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_and_neighbours_do_not_meet(path: Path) -> None:
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    for module, line, for_types in imports(path):
        package, _, rest = module.partition(".")
        there = rest.partition(".")[0]
        if package != "fsdp_ckpt" or for_types or there in ("", "__version__"):
            continue
        where = f"{name_of(path)}:{line} imports {module}"
        assert there in FLOORS, where
        assert there == here or FLOORS[there] < FLOORS[here], where


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_command_line_knows_the_terminal(path: Path) -> None:
    if room(path) != "cli":
        found = [f"{name_of(path)}:{line}" for module, line, _ in imports(path) if module.partition(".")[0] in TERMINAL]
        assert not found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_is_a_guest(path: Path) -> None:
    if room(path) == "train" or name_of(path) in TORCH_ALLOWED:
        return
    found = [f"{name_of(path)}:{line}" for module, line, _ in imports(path) if module.partition(".")[0] in TORCH]
    assert not found


PICKLE_ERRORS = {"PicklingError", "UnpicklingError"}
"""What torch.save and torch.load raise; to import a class of errors runs nothing."""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_pickles_are_not_run(path: Path) -> None:
    tree = ast.parse(path.read_text())
    errors_only = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= PICKLE_ERRORS
    }
    found = [
        f"{name_of(path)}:{line}"
        for module, line, _ in imports(path)
        if module.partition(".")[0] in ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
        and line not in errors_only
    ]
    assert not found
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_longer_than_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


PROGRAMS = ("train/elastic.py", "train/driver/__main__.py")
"""What torchrun and the launcher start as processes of their own: ending them is their task."""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_library_code_neither_prints_nor_exits(path: Path) -> None:
    if room(path) in ("cli", "__main__") or name_of(path) in PROGRAMS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "sys.exit", "exit", "os._exit"), f"{name_of(path)}:{node.lineno}"


def test_programs_are_imported_by_nobody() -> None:
    names = {"fsdp_ckpt." + name.removesuffix(".py").replace("/", ".") for name in PROGRAMS}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.module in names), name_of(path)


def test_the_public_names_are_lazy_and_there() -> None:
    code = (
        "import sys, fsdp_ckpt; before = [n for n in sys.modules if n.startswith('fsdp_ckpt.')];"
        "light = [n for n in fsdp_ckpt.__all__ if not fsdp_ckpt._HOMES.get(n, '').startswith('train.')];"
        "values = [getattr(fsdp_ckpt, name) for name in light];"
        "heavy = {'torch', 'numpy', 'rich', 'typer', 'huggingface_hub', 'safetensors'};"
        "print(before, sorted(heavy & set(sys.modules)));"
        "values = [getattr(fsdp_ckpt, name) for name in fsdp_ckpt.__all__]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[] []\n"
