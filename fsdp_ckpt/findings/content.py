"""3xx: the bytes themselves, and the numbers in them."""

from __future__ import annotations

from fsdp_ckpt.findings.kind import Kind

__all__ = ["KINDS"]

KINDS = (
    Kind(
        code="E301",
        name="wrong-checksum",
        title="Bytes are not those that were written",
        meaning="torch loads them without a word; load_state and merge refuse.",
        causes="A fault of disk, memory or network, a copy that was not compared, or a tool that wrote into the file.",
        fix="Copy the file again from where it was saved, or let the piece be taken from a replica.",
        command="fsdp-ckpt repair {path} --replica BACKUP",
    ),
    Kind(
        code="E302",
        name="damaged-item",
        title="An item of a data file cannot be read",
        meaning="Loading stops with an error about the archive.",
        causes="Bytes have changed, or metadata and data are of different saves.",
        fix="Copy the file again from where it was saved, or let the piece be taken from a replica.",
        command="fsdp-ckpt repair {path} --replica BACKUP",
    ),
    Kind(
        code="E303",
        name="replicas-differ",
        title="Ranks have different values of what should be the same",
        meaning="Which value is loaded depends on which rank's copy is read.",
        causes="Buffers that are not synchronised (harmless), ranks that drifted apart, or shards of which nobody "
        "recorded that they are shards.",
        fix="If it is a buffer, none is needed. Otherwise compare the copies.",
        command="fsdp-ckpt inspect {path} --shards",
    ),
    Kind(
        code="N304",
        name="no-checksums",
        title="No checksums were recorded",
        meaning="Changed bytes cannot be told from right ones.",
        causes="safetensors files have none, nor has torch.save with compute_crc32=False, or before torch 1.6.",
        fix="save_state records one for every file; compare with a copy that you trust.",
        command="fsdp-ckpt diff {path} BACKUP",
    ),
    Kind(
        code="N305",
        name="headers-not-read",
        title="There are too many items to look at each",
        meaning="Whether each is what the metadata say is not known yet.",
        causes="A checkpoint of thousands of ranks.",
        fix="Ask for it; it takes about a minute for a million items.",
        command="fsdp-ckpt validate {path} --level headers",
    ),
    Kind(
        code="W310",
        name="nan-values",
        title="NaN among the values",
        meaning="Training goes on with NaN.",
        causes="Training diverged before this step; or a tool left memory as it was.",
        fix="Take an older checkpoint, and look for the first one without.",
        command="fsdp-ckpt list {parent}",
    ),
    Kind(
        code="W311",
        name="inf-values",
        title="Infinities among the values",
        meaning="Training goes on with them, and soon with NaN.",
        causes="An overflow, often of float16, or of a cast to it.",
        fix="Take an older checkpoint, or the weights in a wider type.",
    ),
    Kind(
        code="W312",
        name="all-zero",
        title="A weight matrix of nothing but zeros",
        meaning="It loads; a layer with it does nothing.",
        causes="It was never loaded into the model that was saved, a file has holes, or it is an adapter's B matrix "
        "before its first step.",
        fix="Compare with the checkpoint before this one.",
        command="fsdp-ckpt diff {path} BEFORE",
    ),
    Kind(
        code="N313",
        name="constant",
        title="A matrix whose values are all the same",
        meaning="It loads.",
        causes="It was set so and never trained.",
        fix="None is needed if it was meant.",
    ),
    Kind(
        code="N314",
        name="denormal",
        title="Many values below the smallest normal number",
        meaning="They load; hardware may take them for zero.",
        causes="Weights that decay, or a cast to a type with a smaller range.",
        fix="None is needed if it was meant.",
    ),
)
