"""Write the ``.metadata`` of torch.distributed.checkpoint without torch: the mirror of ``dcp_metadata``.

The opcodes are those of torch 2.13's own files, with two differences. The globals, names and keys that records refer
to are put into the memo before the first record, so that all records look alike and ``dcp_bulk`` takes them in one
run. And the whole pickle is one frame, which readers of remote files fetch in one piece.

torch 2.3 and newer can open the result; with a save id, 2.4 and newer, as 2.3 lacks the class that holds it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from fsdp_ckpt.catalog import Shape
from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, DcpTensor, StorageInfo

__all__ = ["write_metadata"]

_DCP = "torch.distributed.checkpoint"
_VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.9 to 2.15."""

# Opcodes, see ``codec/opcodes.py``. A record is memoized with its state where ``dcp_bulk`` expects that.
_NEW = b")\x81\x94}\x94("
_NEW_UNNAMED = b")\x81}("
_BUILD = b"ub"
_FALSE = b"\x89"


def write_metadata(metadata: DcpMetadata, *, save_id: str | None = None) -> bytes:
    """Return the bytes of a ``.metadata`` file.

    ``read_metadata`` of the result gives an equal ``metadata``, but for ``writer``, which becomes "torch 2.9-2.14".

    Args:
        metadata: What to write; tensors come before objects.
        save_id: What tells this save from others, torch uses a UUID; None to leave it out.

    Raises:
        ValueError: The place of something that is neither a chunk of a tensor nor an object.

    Example:
        >>> from fsdp_ckpt.codec.dcp_metadata import DcpMetadata, read_metadata
        >>> empty = DcpMetadata(tensors={}, objects=[], paths={}, storage={}, writer="torch 2.9-2.14")
        >>> read_metadata(write_metadata(empty, save_id="7"), where="here") == empty
        True
    """
    writer = _Writer()
    writer.begin(metadata)
    writer.items(metadata)
    writer.planner_data(metadata)
    writer.storage_data(metadata)
    writer.end(save_id)
    body = b"".join(writer.parts)
    return b"\x80\x04\x95" + struct.pack("<Q", len(body)) + body


class _Writer:
    """The pickle as far as it is written.

    Attributes:
        parts: Its pieces.
        num_slots: Values in the unpickler's memo at this point.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.num_slots = 0
        self._texts: dict[str, bytes] = {}
        self._dtypes: dict[str, bytes] = {}
        # By key and offsets of the chunk: its number and, once more, the offsets, as the state of its index has them.
        self._indices: dict[str, dict[Shape | None, bytes]] = {}
        metadata = f"{_DCP}.metadata"
        self._metadata = self._global(metadata, "Metadata")
        self._tensor = self._global(metadata, "TensorStorageMetadata")
        self._properties = self._global(metadata, "TensorProperties")
        self._chunk = self._global(metadata, "ChunkStorageMetadata")
        self._object = self._global(metadata, "BytesStorageMetadata")
        self._index = self._global(metadata, "MetadataIndex")
        self._info = self._global(f"{_DCP}.filesystem", "_StorageInfo")
        self._size = self._global("torch", "Size")
        self._strided = self._keep(b"ctorch.serialization\n_get_layout\n" + _text("torch.strided") + b"\x85R")
        # A call of the enumeration, which every Python reads; early 3.11 writes getattr() instead.
        self._contiguous = self._keep(b"c%s\n_MEM_FORMAT_ENCODING\nK\0\x85R" % metadata.encode())

    def begin(self, metadata: DcpMetadata) -> None:
        """Fill the memo with what the records refer to: their names have to be among the first 256, keys follow."""
        self._push_all(("properties", "size", "chunks", "offsets", "sizes"))
        self._push_all(("fqn", "index", "offset", "relative_path", "length"))
        for name in dict.fromkeys(tensor.dtype.name for tensor in metadata.tensors.values()):
            self._dtypes[name] = self._global("torch", name)
        self._push_all(metadata.tensors)
        self._push_all(metadata.objects)
        self._push_all(info[0] for info in metadata.storage.values())
        self.parts.append(self._metadata + _NEW_UNNAMED)

    def items(self, metadata: DcpMetadata) -> None:
        """Write ``state_dict_metadata``."""
        self.parts.append(_text("state_dict_metadata") + b"}(")
        for key, tensor in metadata.tensors.items():
            self.parts.append(self._push(key))
            self._indices[key] = self._tensor_item(tensor)
        for key in metadata.objects:
            self.parts.append(self._push(key) + self._object + b")\x81")
            # As in torch's pickles: an object has no number, and no offset rather than None.
            self._indices.setdefault(key, {})[None] = b"N"
        self.parts.append(b"u")

    def planner_data(self, metadata: DcpMetadata) -> None:
        """Write where the keys stood in the nested state dict."""
        for key, path in metadata.paths.items():
            self._push_all((key, *(step for step in path if isinstance(step, str))))
        self.parts.append(_text("planner_data") + b"}(")
        for key, path in metadata.paths.items():
            steps = [self._push(step) if isinstance(step, str) else _int(step) for step in path]
            self.parts.append(self._push(key) + _tuple(steps))
        self.parts.append(b"u")

    def storage_data(self, metadata: DcpMetadata) -> None:
        """Write the places. What they add to the memo is not counted: nothing refers to it later."""
        self.parts.append(_text("storage_data") + b"}(")
        first = self._index + _NEW + self._push("fqn")
        number = self._push("index")
        second = _BUILD + self._info + _NEW + self._push("relative_path")
        start, length = self._push("offset"), self._push("length")
        push, indices, add = self._texts, self._indices, self.parts.append
        for (key, offsets), info in metadata.storage.items():
            index = indices.get(key, {}).get(offsets)
            if index is None:
                raise ValueError(f"the place of `{key}` at {offsets}, which is not among the items")
            path, begin, num_bytes, transforms = info
            add(first + push[key] + number + index + second + push[path] + start + _int(begin) + length)
            add(_int(num_bytes) + (_transforms(info) if transforms else b"") + _BUILD)
        self.parts.append(b"u")

    def end(self, save_id: str | None) -> None:
        """Write the rest. Fields that torch does not know yet (modules before 2.7, version before 2.9) do no harm.

        Unpickling sets them in the object's ``__dict__``, whatever its class declares; so it is with a storage info's
        ``transform_descriptors`` before 2.7. ``checkpoint_id`` stays None: torch's is a path, whose class has another
        module from Python 3.13 on.
        """
        if save_id is None:
            self.parts.append(_text("storage_meta") + b"N" + _text("version") + _text(_VERSION) + _BUILD + b".")
            return
        fields = _text("checkpoint_id") + b"N" + _text("save_id") + _text(save_id) + _text("load_id") + b"N"
        meta = b"c%s.metadata\nStorageMeta\n" % _DCP.encode() + _NEW_UNNAMED + fields + _text("modules") + b"]" + _BUILD
        self.parts.append(_text("storage_meta") + meta + _text("version") + _text(_VERSION) + _BUILD + b".")

    def _tensor_item(self, tensor: DcpTensor) -> dict[Shape | None, bytes]:
        """Write a tensor with its chunks and return the ends of their indices, by offsets."""
        # The five fields that torch 2.3 to 2.14 insist on, and that 2.15, which writes six, takes as well.
        fields = (self._dtypes[tensor.dtype.name], self._strided, _FALSE, self._contiguous, _FALSE)
        properties = self._push("properties") + self._properties + b")\x81(" + b"".join(fields) + b"tb"
        size = self._push("size") + self._size + _dims(tensor.shape)
        self.parts.append(self._tensor + _NEW_UNNAMED + properties + size + self._push("chunks") + b"](")
        self.num_slots += _num_dims_slots(tensor.shape)
        first, second = self._push("offsets") + self._size, self._push("sizes") + self._size
        first, offset = self._chunk + _NEW + first, self._push("offset")
        slots, add = self.num_slots, self.parts.append
        indices: dict[Shape | None, bytes] = {}
        for number, (offsets, lengths) in enumerate(tensor.chunks):
            add(first + _dims(offsets) + second + _dims(lengths) + _BUILD)
            slots += 2 + _num_dims_slots(offsets)
            indices[offsets] = _int(number) + offset + _get(slots - 1)
            slots += _num_dims_slots(lengths)
        self.num_slots = slots
        self.parts.append(b"e" + _BUILD)
        return indices

    def _keep(self, value: bytes) -> bytes:
        """Put a value into the memo (and off the stack again), and return the push of it."""
        self.parts.append(value + b"\x940")
        self.num_slots += 1
        return _get(self.num_slots - 1)

    def _global(self, module: str, name: str) -> bytes:
        return self._keep(b"c%s\n%s\n" % (module.encode(), name.encode()))

    def _push(self, text: str) -> bytes:
        """Return the push of a text, which goes into the memo when it is new."""
        push = self._texts.get(text)
        if push is None:
            push = self._texts[text] = self._keep(_text(text))
        return push

    def _push_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._push(text)


def _transforms(info: StorageInfo) -> bytes:
    return _text("transform_descriptors") + b"](" + b"".join(map(_text, info[3])) + b"e"


@lru_cache(maxsize=1 << 16)
def _dims(shape: Shape) -> bytes:
    """Return what follows the torch.Size class: the call with its dimensions, memoized as in torch's own files."""
    return _tuple([_int(size) for size in shape]) + (b"\x94\x85\x94R\x94" if shape else b"\x85\x94R\x94")


def _num_dims_slots(shape: Shape) -> int:
    """Return how many values ``_dims`` puts into the memo; the last one is the torch.Size."""
    return 3 if shape else 2


_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


def _tuple(items: list[bytes]) -> bytes:
    code = _TUPLES.get(len(items))
    return b"".join(items) + code if code else b"(" + b"".join(items) + b"t"


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return (b"\x8c%c" % len(data) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data


def _int(number: int) -> bytes:
    if 0 <= number < 1 << 16:
        return b"K%c" % number if number < 256 else b"M" + number.to_bytes(2, "little")
    if -1 << 31 <= number < 1 << 31:
        return b"J" + number.to_bytes(4, "little", signed=True)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(data) + data


def _get(slot: int) -> bytes:
    return b"h%c" % slot if slot < 256 else b"j" + slot.to_bytes(4, "little")
