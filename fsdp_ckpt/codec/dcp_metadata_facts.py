"""What a ``.metadata`` file says besides tensors and places: the classes it needs, and which save it was."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ckpt.codec.dcp_metadata import unpickle_metadata
from fsdp_ckpt.codec.pickles import Global, Record
from fsdp_ckpt.errors import MalformedFile

__all__ = ["MetadataFacts", "read_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFacts:
    """Facts about one file.

    Attributes:
        globals: Classes and values that loading it imports, as ``module.qualname``.
        fields: Fields of its tensors' properties: five, six from torch 2.15 on; 0 without tensors.
        save_id: What torch tells this save from others by; None before torch 2.4.
    """

    globals: frozenset[str]
    fields: int
    save_id: str | None


class _Watched(dict[str, Global]):
    """Globals that are known; remembers which ones were asked for."""

    def __init__(self, known: dict[str, Global]) -> None:
        super().__init__(known)
        self.seen: set[str] = set()

    def get(self, name: str, default: Global = None) -> Global:
        self.seen.add(name)
        return super().get(name, default)


def read_facts(data: bytes, *, where: str) -> MetadataFacts:
    """Parse a ``.metadata`` file.

    Args:
        data: Its bytes.
        where: Its name, for messages.

    Raises:
        UnsafePickle: It refers to a global that no known writer uses.
        MalformedFile: It is broken.
    """
    watched: list[_Watched] = []

    def watch(known: dict[str, Global]) -> _Watched:
        watched.append(_Watched(known))
        return watched[-1]

    root = unpickle_metadata(data, where=where, watch=watch)
    try:
        items = root.get("state_dict_metadata").values()
        tensors = (item.get("properties") for item in items if not item.cls.endswith("BytesStorageMetadata"))
        fields = max((len(properties.state) for properties in tensors), default=0)
        meta = root.get("storage_meta")
        save_id = meta.get("save_id") if isinstance(meta, Record) else None
    except (AttributeError, TypeError) as error:
        raise MalformedFile(f"{where}: unexpected structure: {error}") from None
    return MetadataFacts(
        globals=frozenset(watched[-1].seen), fields=fields, save_id=save_id if isinstance(save_id, str) else None
    )
