"""The other side of ``sandbox``: reads requests from stdin, forks, answers on stdout."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

_DANGER = {
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pickle.find_class",
    "pty.spawn",
    "socket.connect",
    "subprocess.Popen",
    "webbrowser.open",
}
_FILE_BYTES = 256 << 20


def _preload() -> None:
    """Import what the command imports lazily, so that children need not."""
    import numpy as np
    import rich.box
    import rich.console
    import rich.table
    import rich.text
    import rich.tree
    import zstandard

    import fsdp_ckpt.cli.app
    import fsdp_ckpt.cli.inspect_view
    import fsdp_ckpt.cli.merge_view
    import fsdp_ckpt.ops.inspect
    import fsdp_ckpt.ops.merge
    import fsdp_ckpt.run.gather

    _ = (np, rich, zstandard, fsdp_ckpt)
    with contextlib.redirect_stdout(io.StringIO()):  # typer imports pydantic when it parses for the first time
        assert _call(["inspect", str(Path(__file__).parents[2] / "fixtures/edge/tied"), "-q"], direct=False) == 0


def _serve() -> None:
    _preload()
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            answer = _answer(json.loads(line), Path(folder))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    pid = os.fork()
    if pid == 0:
        try:
            _child(request, folder)
        except BaseException:  # noqa: BLE001  # a child must not come back
            traceback.print_exc()
        finally:
            os._exit(99)
    _, status, usage = os.wait4(pid, 0)
    report = folder / "report"
    lines = report.read_text().splitlines() if report.exists() else []
    err = folder / "err"
    return {
        "done": [json.loads(line) for line in lines],
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status),
        "err": err.read_text(errors="replace")[-4000:] if err.exists() else "",
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def _child(request: dict[str, Any], folder: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    streams = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")]
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_AS, (request["limit_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(request["timeout_s"])
    opened: list[str] = []
    danger: list[str] = []
    own = (
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).parents[2] / "fsdp_ckpt"),
        str(folder),
        "/proc/",
        "/sys/fs/cgroup/",
    )

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _DANGER:
            danger.append(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            name = os.fsdecode(arguments[0])
            if not name.startswith(own):
                opened.append(name)

    sys.addaudithook(watch)
    with open(folder / "report", "w") as report:
        for case in request["cases"]:
            opened.clear()
            danger.clear()
            begin = [os.lseek(stream, 0, os.SEEK_END) for stream in streams]
            backups = _edit(case["edits"])
            code = _call(case["argv"], direct=case["direct"])
            result: dict[str, Any] = {"code": code, "opened": sorted(set(opened)), "danger": list(danger)}
            for name, stream, start in zip(("out", "err"), streams, begin, strict=True):
                text = os.pread(stream, os.fstat(stream).st_size - start, start)
                result[name] = text.decode(errors="replace")
            _restore(backups)
            if case["out"] is not None:
                out = Path(case["out"])
                result["digest"] = _digest(out)
                result["hidden"] = sorted(entry.name for entry in out.parent.glob(".*"))
                shutil.rmtree(out, ignore_errors=True)
            report.write(json.dumps(result) + "\n")
            report.flush()
    os._exit(0)


def _call(argv: list[str], *, direct: bool) -> int:
    sys.argv = ["fsdp-ckpt", *argv]
    try:
        if direct:
            _call_function(argv)
        else:
            from fsdp_ckpt.__main__ import main

            main()
        code: Any = 0
    except SystemExit as error:
        code = error.code
    except typer.Exit as error:
        code = error.exit_code
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _call_function(argv: list[str]) -> None:
    """Call a command's function, with ``--flag`` as a keyword: half of the time goes into parsing otherwise."""
    from fsdp_ckpt.cli.inspect import inspect
    from fsdp_ckpt.cli.merge import merge

    names = {"json": "as_json"}
    flags = [word[2:].replace("-", "_") for word in argv[1:] if word.startswith("--")]
    paths = [word for word in argv[1:] if not word.startswith("--")]
    options: dict[str, Any] = {names.get(flag, flag): True for flag in flags}
    command: Callable[..., None] = merge if argv[0] == "merge" else inspect
    command(*paths, **options)


def _edit(edits: list[dict[str, Any]]) -> list[tuple[str, int, bytes, os.stat_result]]:
    """Change files in place; return what stood there. Writing them anew would make ext4 flush them each time."""
    backups = []
    for edit in edits:
        path, offset, data = edit["path"], edit["offset"], bytes.fromhex(edit["data"])
        status = os.stat(path)
        fd = os.open(path, os.O_RDWR)
        if edit["size"] is not None:
            offset = edit["size"]
            before = os.pread(fd, status.st_size - offset, offset)
            os.ftruncate(fd, offset)
        else:
            before = os.pread(fd, len(data), offset)
            os.pwrite(fd, data, offset)
        os.close(fd)
        backups.append((path, offset, before, status))
    return backups


def _restore(backups: list[tuple[str, int, bytes, os.stat_result]]) -> None:
    for path, offset, before, status in reversed(backups):
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, before, offset)
        os.close(fd)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _digest(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    _serve()
