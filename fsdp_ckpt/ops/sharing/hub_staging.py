"""Write a result into a repository on the hub: put together here, and shown there in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_ckpt.errors import DestinationExists, UsageError
from fsdp_ckpt.ops.sharing.hub_address import HubAddress, parse_hub_address
from fsdp_ckpt.ops.sharing.hub_client import HubClient, RemoteFile, quiet_hub
from fsdp_ckpt.ops.sharing.upload import Upload, is_same, upload
from fsdp_ckpt.run.progress import Listener, Meter
from fsdp_ckpt.store.publish import Staging
from fsdp_ckpt.store.remote.mirrors import add_mirror
from fsdp_ckpt.store.remote.target import Target

__all__ = ["HubStaging", "hub_target"]

_KEPT = frozenset({".gitattributes", "README.md"})
"""What a repository has of its own, before anything is put into it."""


class _HubTarget(Target):
    """A folder in a repository, or all of it; the files that are there, and the repository's own among them."""

    def __init__(self, url: str, client: HubClient, there: Mapping[str, RemoteFile]) -> None:
        self.client = client
        self.kept = _KEPT.intersection(there) if not client.address.path else frozenset()
        path = client.address.path
        base = url[len("hf://") :].strip("/")
        top = base.removesuffix(path).rstrip("/") if path else base
        found: dict[str, Mapping[str, Any]] = {
            f"{top}/{name}": {"size": file.num_bytes} for name, file in there.items() if name not in self.kept
        }
        super().__init__(url, None, base, found=found)


def hub_target(url: str) -> Target:
    """Look at a repository that is to be written to; one that does not exist yet is made when there is a result.

    Raises:
        UsageError: It is no address, or one of a commit.
        Unreachable: Nobody is logged in, or it cannot be listed.
    """
    address = parse_hub_address(url)
    _refuse_fixed(address)
    client = HubClient(address)
    client.demand_login()
    with quiet_hub():
        there = _there(client)
    made = _HubTarget(url, client, there)
    add_mirror(made)
    return made


def _refuse_fixed(address: HubAddress) -> None:
    if address.is_pinned:
        raise UsageError(
            f"`{address}` is a commit, to which nothing can be added", hint=f"write to a branch: {address.at(None)}"
        )


def _there(client: HubClient) -> Mapping[str, RemoteFile]:
    """Return the files below the address, by path in the repository; none where it does not exist.

    Raises:
        Unreachable: The hub does not answer, or it is a pull request that does not exist.
    """
    main, revision = client.state_or_none(None), client.address.revision
    state = main if revision is None else client.state_or_none(revision)
    if state is None and revision is not None and revision.startswith("refs/"):
        client.state()  # says that it does not exist
    state = state or main  # a branch that is new begins as the default one
    return client.files(state.commit) if state is not None else {}


class HubStaging(Staging):
    """A local folder that becomes one commit.

    Args:
        target: Of ``hub_target``.
        identity: Hexadecimal; equal for runs that would write the same bytes.
        overwrite: Whether files that are there may be replaced, and those that are no part of the result removed.
        listener: Told about the progress of the upload.
    """

    def __init__(
        self, target: Target, identity: str, *, overwrite: bool = False, listener: Listener | None = None
    ) -> None:
        assert isinstance(target, _HubTarget)
        super().__init__(target.path, identity, overwrite=overwrite)
        self.target = target
        self._listener = listener
        self._names: list[str] = []

    def finish_file(self, name: str, part: Path, note: str) -> None:
        """Keep a complete file."""
        super().finish_file(name, part, note)
        self._names.append(name)

    def add_file(self, name: str, data: bytes, *, durable: bool) -> None:  # noqa: ARG002 - as Staging's
        """Take a small file of the result."""
        super().add_file(name, data, durable=False)
        self._names.append(name)

    def add_copy(self, name: str, src: Path, *, durable: bool) -> None:  # noqa: ARG002 - as Staging's
        """Take a file for the result."""
        super().add_copy(name, src, durable=False)
        self._names.append(name)

    def has_finished(self) -> bool:
        """Tell that nothing is kept for another run."""
        return False

    def publish(self, *, durable: bool = True, keep_old: bool = False) -> None:  # noqa: ARG002 - as Staging's
        """Bring everything to the hub, in one commit that also removes what was replaced.

        Raises:
            DestinationExists: Something appeared there in the meantime.
            Unreachable: The hub does not answer, or does not let this user.
            IncompleteCheckpoint: It did not take all files.
        """
        client, address = self.target.client, self.target.client.address
        files: dict[str, str | bytes] = {
            address.inside(name): str(self.path / name) for name in self._names if name not in self.target.kept
        }
        with quiet_hub():
            there = {name: file for name, file in _there(client).items() if name not in self.target.kept}
            if there and not self.overwrite:
                raise DestinationExists(f"`{client.url}/{min(there)}` appeared while the result was being written")
            client.create(private=True)
            if address.revision is not None and not address.revision.startswith("refs/"):
                client.create_branch(address.revision)
            what = Upload(
                files=files,
                removed=[name for name in there if name not in files],
                replaced=[name for name in files if name in there],
                message=f"Add a checkpoint written by fsdp-ckpt{f' to {address.path}' if address.path else ''}",
                revision=address.revision,
            )
            if what.removed or not all(is_same(source, there.get(name)) for name, source in files.items()):
                num_bytes = sum((self.path / name).stat().st_size for name in self._names)
                upload(client, what, meter=Meter(num_bytes, self._listener))
        self.discard()
