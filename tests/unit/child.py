"""Try something that may end the process."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

__all__ = ["outcome"]


def outcome(function: Callable[[], object], *, memory_bytes: int | None = None, cpu_s: int = 20) -> str:
    """Call a function in a forked child.

    Args:
        function: What to try.
        memory_bytes: Address space that the child may add to what it has.
        cpu_s: Processor time after which it is killed.

    Returns:
        ``ok``, the name of the exception's class, or ``signal N``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        text = "ok"
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            if memory_bytes is not None:
                limit = _address_space() + memory_bytes
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            function()
        except BaseException as error:  # noqa: BLE001  # its name is the result
            text = type(error).__name__
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
