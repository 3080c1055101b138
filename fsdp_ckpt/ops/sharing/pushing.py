"""Carry out a push: look at the repository, and bring what is not there."""

from __future__ import annotations

import os
import posixpath
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_ckpt.catalog import Checkpoint, Part
from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.ops.sharing.belonging import Belonging, choose_parts, find_belonging
from fsdp_ckpt.ops.sharing.hub_address import HubAddress
from fsdp_ckpt.ops.sharing.hub_client import HubClient, RemoteFile, RepoState, quiet_hub
from fsdp_ckpt.ops.sharing.model_card import write_card
from fsdp_ckpt.ops.sharing.report import PushOptions, PushReport
from fsdp_ckpt.ops.sharing.upload import Committed, Upload, is_same, upload
from fsdp_ckpt.ops.validation.wording import few
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.store.local import LocalStore
from fsdp_ckpt.store.remote.urls import local_path

__all__ = ["run_push"]

_CARD = "README.md"
_WEIGHTS = (".safetensors", ".distcp", ".metadata", ".bin", ".pt", ".pth", ".ckpt")


def run_push(
    given: str,
    checkpoint: Checkpoint,
    address: HubAddress,
    options: PushOptions,
    *,
    warnings: Sequence[str],
    listener: Listener | None,
) -> PushReport:
    """Bring a checkpoint to a repository.

    Args:
        given: The checkpoint's path as typed.
        checkpoint: What is there.
        address: Where to.
        options: How.
        warnings: For the report.
        listener: Told how far it is.

    Raises:
        As ``push``.
    """
    with quiet_hub():
        return _Push(given, checkpoint, address, options, warnings=warnings, listener=listener).run()


class _Push:
    """One push."""

    def __init__(
        self,
        given: str,
        checkpoint: Checkpoint,
        address: HubAddress,
        options: PushOptions,
        *,
        warnings: Sequence[str],
        listener: Listener | None,
    ) -> None:
        self.given = given
        self.checkpoint = checkpoint
        self.address = address
        self.options = options
        self.warnings = warnings
        self.listener = listener
        self.client = HubClient(address)
        self.parts: list[Part] = choose_parts(checkpoint, options.parts)
        is_file = Path(local_path(given)).is_file()
        self.belonging: Belonging = find_belonging(checkpoint, self.parts, is_file=is_file)
        self.notes: list[str] = []
        if checkpoint.chosen is not None:
            self.notes.append(f"{checkpoint.chosen} means {checkpoint.root}")
        if not self.belonging.files:
            raise UsageError(f"`{given}` has no files to push", hint=f"fsdp-ckpt inspect {shlex.quote(given)}")

    def run(self) -> PushReport:
        """Look at the repository, and bring what is not there."""
        self.client.demand_login()
        state, is_new = self._repository()
        there = self.client.files(state.commit) if state is not None else {}
        if self.address.path in there:
            raise UsageError(f"`{self.address}` is a file, and no folder to put files into", hint="name a folder")
        sources = self._sources()
        has_card = self._add_card(sources, state, there)
        removed = self._others(there)
        sizes = {path: _size(source) for path, source in sources.items()}
        skipped = {path: sizes[path] for path, source in sources.items() if is_same(source, there.get(path))}
        sent = {path: sizes[path] for path in sources if path not in skipped}
        message = self.options.message or self._message()
        meter = Meter(sum(sent.values()), self.listener)
        done: Committed | None = None
        if (sent or removed) and not self.options.dry_run:
            what = Upload(
                files={path: sources[path] for path in sent},
                removed=removed,
                replaced=[path for path in sent if path in there],
                message=message,
                revision=self.address.revision,
                create_pr=self.options.create_pr,
            )
            done = upload(self.client, what, meter=meter)
        where = self.address.at(done.pull_revision) if done is not None and done.pull_revision else self.address
        return PushReport(
            path=self.given,
            root=str(self.checkpoint.root),
            url=str(where),
            dry_run=self.options.dry_run,
            private=self.is_private,
            created=is_new,
            commit=done.commit if done is not None else None,
            commit_url=done.url if done is not None else None,
            pull_request=done.pull_request if done is not None else None,
            message=message,
            files=sent,
            num_bytes=sum(sent.values()),
            skipped=skipped,
            removed=removed,
            card=has_card,
            left_out=self.belonging.left_out,
            warnings=self.warnings,
            notes=self.notes,
            elapsed_s=time.monotonic() - meter.started,
        )

    def _repository(self) -> tuple[RepoState | None, bool]:
        """Return the state at the revision, None where there is none yet, and whether the repository is new."""
        options, client, revision = self.options, self.client, self.address.revision
        main = client.state_or_none(None)
        is_new = main is None
        self.is_private = main.is_private if main is not None else not options.public
        if main is None:
            if options.create_pr:
                client.state()  # says why not
            if options.dry_run:
                return None, True
            client.create(private=not options.public)
            main = client.state_or_none(None)
        elif self.is_private and options.public:
            self.notes.append(f"{self.address.repo} exists, and is private: it stays so")
        elif not self.is_private and not options.public:
            self.notes.append(f"{self.address.repo} exists, and is public: everybody can see what is pushed")
        if revision is None or options.create_pr:
            return main, is_new
        state = client.state_or_none(revision)
        if state is None:
            if revision.startswith("refs/"):
                client.state()  # says that it does not exist
            self.notes.append(f"the branch {revision} is new")
            if not options.dry_run:
                client.create_branch(revision)
                state = client.state_or_none(revision)
        return state or main, is_new

    def _sources(self) -> dict[str, str | bytes]:
        """Return the local files by their paths in the repository."""
        store = LocalStore(self.checkpoint.roots)
        return {self.address.inside(file): store.path(file) for file in self.belonging.files}

    def _add_card(
        self, sources: dict[str, str | bytes], state: RepoState | None, there: Mapping[str, RemoteFile]
    ) -> bool:
        """Add a model card where neither the repository nor the checkpoint has one."""
        if not self.options.card or _CARD in sources or _CARD in there:
            return False
        if self.address.path and state is not None and self.client.files(state.commit, _CARD):
            return False
        sources[_CARD] = write_card(self.checkpoint, self.parts, self.address).encode()
        return True

    def _others(self, there: Mapping[str, RemoteFile]) -> list[str]:
        """Return weights of another checkpoint that would stay beside this one's, and be taken for them by readers.

        Raises:
            DestinationExists: There are some, and nobody said to remove them.
        """
        mine = {self.address.inside(file) for file in self.belonging.all_files}
        folders = {posixpath.dirname(self.address.inside(file)) for part in self.parts for file in part.files}
        kinds = {_kind(file) for part in self.parts for file in part.files} - {None}
        others = [
            path for path in there if path not in mine and posixpath.dirname(path) in folders and _kind(path) in kinds
        ]
        if others and not self.options.replace:
            free = self.address.at(self.address.revision, self.address.inside("NAME"))
            raise DestinationExists(
                f"`{self.address}` holds weights of another checkpoint, which would stay beside these: {few(others)}",
                hint=f"--replace    (removes them in the same commit), or another place: {free}",
            )
        return others

    def _message(self) -> str:
        step = f", step {self.checkpoint.step}" if self.checkpoint.step is not None else ""
        what = "checkpoint" if self.belonging.is_whole else " and ".join(part.name for part in self.parts[:3])
        return f"Upload {what}{step} with fsdp-ckpt"


def _kind(file: str) -> str | None:
    """Return what makes files be taken for parts of one checkpoint: their ending, with that of their index."""
    name = file.removesuffix(".index.json")
    return next((suffix for suffix in _WEIGHTS if name.endswith(suffix)), None)


def _size(source: str | bytes) -> int:
    return len(source) if isinstance(source, bytes) else os.path.getsize(source)
