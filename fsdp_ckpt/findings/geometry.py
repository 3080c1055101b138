"""2xx: whether shards make up tensors, and tensors what they seem to be."""

from __future__ import annotations

from fsdp_ckpt.findings.kind import Kind

__all__ = ["KINDS"]

KINDS = (
    Kind(
        code="E201",
        name="shard-overlap",
        title="Two shards of a tensor share elements",
        meaning="Which of the two values is loaded depends on the order of reading.",
        causes="Metadata of different saves were put together, or they are damaged.",
        fix="Take the checkpoint before this one.",
    ),
    Kind(
        code="E202",
        name="shard-outside",
        title="A shard reaches beyond its tensor",
        meaning="Loaders fail, or write beyond the tensor.",
        causes="Damaged metadata, or a tool that took the shape of one rank's shard for the whole.",
        fix="Take the checkpoint before this one.",
    ),
    Kind(
        code="E203",
        name="shared-bytes",
        title="Two tensors claim the same bytes",
        meaning="One of them gets the other's values.",
        causes="Damaged metadata, or metadata of another save.",
        fix="Take the metadata of another step of the same run, if they fit: repair --like.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="E204",
        name="header-mismatch",
        title="An item is not what the metadata say",
        meaning="Loaders fail, or take the bytes for those of another type or shape.",
        causes="Data and metadata are of different saves, files were swapped, or the metadata are damaged.",
        fix="Look for the files that belong together; otherwise take the checkpoint before this one.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="E205",
        name="one-shard-only",
        title="One rank's shard poses as the whole tensor",
        meaning="The other ranks' shards were never written: loading gives wrong shapes, or resets the rest.",
        causes="FSDP2 with FULL_STATE_DICT in some versions of Accelerate (#4206): rank 0 saved its own state dict.",
        fix="The weights of the other ranks are lost here: take a sharded checkpoint of the same run.",
    ),
    Kind(
        code="E206",
        name="empty-tensor",
        title="A tensor without elements",
        meaning="Loading fails with a wrong shape, or leaves the parameter as it was.",
        causes="FSDP1 had freed it when rank 0 looked: the model was saved outside of a state_dict_type context.",
        fix="Merge a sharded checkpoint of the same run.",
    ),
    Kind(
        code="E207",
        name="flattened-tensor",
        title="A tensor in one dimension that should have more",
        meaning="It is a rank's slice of a flat parameter, or a flattened one: loading fails with a wrong shape.",
        causes="FSDP1 parameters were saved as they lie in memory.",
        fix="Merge a sharded checkpoint of the same run.",
    ),
    Kind(
        code="E208",
        name="duplicate-tensor",
        title="A tensor stands in two files",
        meaning="Loaders take one of the two: which one depends on their order.",
        causes="Files of two saves lie in one folder.",
        fix="Find out which files are newer, and move the others away.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="E209",
        name="name-mismatch",
        title="Key and path of an item contradict each other",
        meaning="Loaders that go by the key and those that go by the path find different things.",
        causes="The metadata are damaged.",
        fix="Take the metadata of another step of the same run, if they fit: repair --like.",
    ),
)
