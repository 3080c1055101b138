"""Run one command and print what it cost: wall seconds, CPU seconds, peak RSS in KiB, exit code.

Started as `python -I -S launch.py LOG COMMAND...`, a process of its own for each measurement. A child's `ru_maxrss` is
never below the size its parent had when it started it (Linux carries the high-water mark of the memory it replaces in
exec over to the child), so the parent must be small: this one has about 9 MB. Hence no imports beyond os, sys and time.
"""

import os
import sys
import time


def main() -> None:
    """Run the command with its output in the log file, wait for it, print the four numbers."""
    log_path, *argv = sys.argv[1:]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    redirect = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log_path, flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    )
    start = time.perf_counter()
    try:
        child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=redirect)
    except OSError as error:
        sys.exit(str(error))
    _, status, usage = os.wait4(child, 0)
    wall_s = time.perf_counter() - start
    print(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
