"""Carry out a pull: look what there is, fetch what is wanted, verify it, and put it in its place."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, Unreachable, UsageError
from fsdp_ckpt.layouts.registry import read_checkpoint
from fsdp_ckpt.names import glob_filter
from fsdp_ckpt.ops.preflight import check_space
from fsdp_ckpt.ops.sharing.belonging import choose_parts, find_belonging
from fsdp_ckpt.ops.sharing.download import download, is_reserved
from fsdp_ckpt.ops.sharing.hub_address import HubAddress
from fsdp_ckpt.ops.sharing.hub_client import HubClient, RemoteFile, quiet_hub
from fsdp_ckpt.ops.sharing.report import PullOptions, PullReport
from fsdp_ckpt.ops.validate import validate
from fsdp_ckpt.ops.validation.report import Finding, Level
from fsdp_ckpt.ops.validation.wording import counted, few
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.store.publish import Staging
from fsdp_ckpt.store.remote.mirrors import mirror_of

__all__ = ["run_pull"]

_NOT_OURS = frozenset({".gitattributes", ".gitignore"})
"""What the hub keeps for itself."""


def run_pull(
    address: HubAddress, given: str, destination: Path, options: PullOptions, *, listener: Listener | None
) -> PullReport:
    """Fetch what is wanted of a repository.

    Args:
        address: Where from.
        given: The destination as typed.
        destination: The same, links resolved.
        options: How.
        listener: Told how far it is.

    Raises:
        As ``pull``.
    """
    with quiet_hub():
        return _Pull(address, given, destination, options, listener).run()


class _Pull:
    """One pull."""

    def __init__(
        self, address: HubAddress, given: str, destination: Path, options: PullOptions, listener: Listener | None
    ) -> None:
        self.address = address
        self.given = given
        self.destination = destination
        self.options = options
        self.listener = listener
        self.client = HubClient(address)
        self.notes: list[str] = []

    def run(self) -> PullReport:
        """Look what there is, fetch what is wanted, and put it in its place."""
        options = self.options
        commit = self.client.state().commit
        there = self.client.files(commit)
        if not there:
            what = f"has no file or folder `{self.address.path}`" if self.address.path else "is empty"
            raise Unreachable(
                f"`{self.address}`: the repository {what}",
                hint=f"fsdp-ckpt pull {self.address.at(self.address.revision, '')} FOLDER --dry-run    (lists all)",
            )
        files = self._wanted(commit, there)
        sizes = {name: file.num_bytes for name, file in sorted(files.items())}
        taken = {file.path for file in files.values()}
        report = PullReport(
            url=str(self.address),
            commit=commit,
            destination=self.given,
            dry_run=options.dry_run,
            files=sizes,
            num_bytes=sum(sizes.values()),
            left_out=sorted(path for path in there if path not in taken),
            notes=self.notes,
        )
        check_space(self.destination, report.num_bytes, len(sizes), casts=False)
        if options.dry_run:
            return report
        meter = Meter(report.num_bytes, self.listener)
        staging = Staging(self.destination, self._identity(commit, files), overwrite=options.overwrite, resume=True)
        try:
            kept = download(self.client, commit, files, staging, meter=meter)
            checked, findings = self._validate(staging.path)
            staging.publish()
        except BaseException as error:
            if not staging.has_finished():
                staging.discard()
                raise
            staging.suspend()
            if isinstance(error, Unreachable):
                error.hint = f"{error.hint}; what came is kept, and the same command goes on with it"
            raise
        elapsed_s = time.monotonic() - meter.started
        return replace(report, kept=kept, checked=checked, findings=findings, elapsed_s=elapsed_s)

    def _wanted(self, commit: str, there: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
        """Return the files to fetch by the names that they get.

        Raises:
            UsageError: None is left.
        """
        base = self.address.path
        if base in there:  # one file
            return {base.rpartition("/")[2]: there[base]}
        skip = len(base) + 1 if base else 0
        named = {path[skip:]: file for path, file in there.items() if path not in _NOT_OURS}
        reserved = [name for name in named if is_reserved(name)]
        if reserved:
            self.notes.append(f"left out, as their names are those of unfinished results: {few(reserved)}")
        chosen = named.keys() - set(reserved)
        if self.options.parts:
            chosen &= self._of_parts(commit)
        keep = glob_filter(self.options.include, self.options.exclude)
        result = {name: named[name] for name in sorted(chosen) if keep.match(name)}
        if not result:
            raise UsageError(
                f"`{self.address}` has {counted(len(named), 'file')}, and none of them is wanted",
                hint=f"such as {few(sorted(named))}",
            )
        return result

    def _of_parts(self, commit: str) -> set[str]:
        """Return the names of the files of the parts that are wanted; only headers are fetched for that."""
        checkpoint = read_checkpoint(str(self.address.at(commit)), tolerant=True)
        mirror = mirror_of(checkpoint.root)
        assert mirror is not None
        below = checkpoint.root.relative_to(mirror.path).as_posix()
        prefix = "" if below == "." else f"{below}/"
        parts = choose_parts(checkpoint, self.options.parts)
        return {prefix + file for file in find_belonging(checkpoint, parts).files}

    def _identity(self, commit: str, files: Mapping[str, RemoteFile]) -> str:
        """Return what is equal for runs that fetch the same files."""
        aim = [
            self.address.kind,
            self.address.repo,
            commit,
            sorted((name, file.digest) for name, file in files.items()),
        ]
        return hashlib.sha256(json.dumps(aim).encode()).hexdigest()[:16]

    def _validate(self, folder: Path) -> tuple[str | None, list[Finding]]:
        """Validate what came, and return how far, and the faults."""
        options = self.options
        if (options.include or options.exclude) and not options.deep:
            self.notes.append("not checked as a checkpoint, as only some of its files were asked for")
            return None, []
        try:
            report = validate(folder, level=Level.DEEP if options.deep else None)
        except CheckpointNotFound:
            self.notes.append("not a checkpoint: sizes and hashes were compared, nothing else")
            return None, []
        except CorruptCheckpoint as error:
            self.notes.append(f"cannot be read as a checkpoint: {error.message}")
            return None, []
        shown = str(folder)
        faults = [
            replace(one, next=one.next.replace(shown, self.given)) for one in report.findings if one.severity == "error"
        ]
        return report.checked.level, faults
