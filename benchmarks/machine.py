"""Describe the machine that a benchmark ran on, without saying where anything lies on it."""

import dataclasses
import datetime as dt
import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("fsdp-ckpt", "torch", "accelerate", "safetensors", "numpy", "ml-dtypes", "isal", "typer", "rich")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a reader must know to judge the numbers.

    Attributes:
        date: Day of the run, UTC, ISO 8601.
        cpu: Model name.
        num_cores: Cores that the process may use.
        memory_bytes: Physical memory.
        kernel: Operating system and kernel release.
        file_system: Type of the file system of the work folder.
        python: Implementation and version.
        packages: Name and version of what was measured; packages that are not installed are left out.
    """

    date: str
    cpu: str
    num_cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    python: str
    packages: dict[str, str]


def describe(work: Path) -> Machine:
    """Describe this machine, with the file system that holds `work`."""
    return Machine(
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        file_system=_file_system(work),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=_packages(),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(work: Path) -> str:
    holders = {work.resolve(), *work.resolve().parents}
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount_point, mounted_kind = line.split()[1:3]
        place = Path(mount_point.encode().decode("unicode_escape"))  # blanks stand as \040
        if place in holders and place.is_relative_to(best):
            best, kind = place, mounted_kind
    return kind


def _packages() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
