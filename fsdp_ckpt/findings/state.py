"""4xx to 7xx: names, training state, indices, and what a version of torch or Python needs."""

from __future__ import annotations

from fsdp_ckpt.findings.kind import Kind

__all__ = ["KINDS"]

KINDS = (
    Kind(
        code="E401",
        name="flat-parameters",
        title="FSDP1 flat parameters",
        meaning="Names and shapes are not in the files: only the same model, wrapped by FSDP1 in the same way, can "
        "load them as they are.",
        causes="LOCAL_STATE_DICT, or state_dict() of the wrapped model with use_orig_params=False.",
        fix="Give the shapes: the model's config.json, or [[name, shape], …] in the order of named_parameters() as "
        "JSON. Or load it with load_state into the model that saved it, and save with SHARDED_STATE_DICT.",
        command="fsdp-ckpt convert {path} OUT --to accelerate --shapes-from shapes.json",
    ),
    Kind(
        code="E402",
        name="local-slices",
        title="One rank's slice poses as the whole tensor",
        meaning="The other ranks' slices were not kept under these names; torch's loader gives every rank the same "
        "one. Their values are, if anywhere, in the flat parameters.",
        causes="LOCAL_STATE_DICT with use_orig_params=True was saved through torch.distributed.checkpoint, which takes "
        "the slices of all ranks for replicas of one tensor.",
        fix="Load it with load_state into the same model, wrapped by FSDP1 in the same way; or take another "
        "checkpoint. Save with SHARDED_STATE_DICT.",
    ),
    Kind(
        code="W403",
        name="wrapper-prefix",
        title="Names with the prefix of a wrapper",
        meaning="Loaders that go by plain names find nothing, or leave the weights as they were. merge and load_state "
        "take the prefix away.",
        causes="The model was saved through torch.compile, DDP, FSDP or an activation checkpoint wrapper.",
        fix="Merge it: the names come out clean.",
        command="fsdp-ckpt merge {path} OUT",
    ),
    Kind(
        code="W404",
        name="adapter-prefix",
        title="An adapter's names are not those that PEFT looks for",
        meaning="PEFT does not match them, warns, and goes on with an adapter of zeros: the training is lost.",
        causes="The adapter was saved through torch.compile or another wrapper, or by state_dict() instead of "
        "save_pretrained().",
        fix="Write the adapter under PEFT's names.",
        command="fsdp-ckpt convert {path} OUT --to adapter",
    ),
    Kind(
        code="W501",
        name="optimizer-without-state",
        title="An optimizer without state",
        meaning="Training goes on as if from its first step: moments and step counts are lost.",
        causes="It was saved before its first step, or FSDP1 lost the state when it was gathered.",
        fix="None is needed for plain SGD; otherwise take another checkpoint.",
    ),
    Kind(
        code="W502",
        name="state-without-parameter",
        title="Optimizer state of a parameter that the model does not have",
        meaning="Loading it fails, or leaves it out.",
        causes="Model and optimizer are of different runs, or parameters were renamed in one of them.",
        fix="Make sure that both are of one save.",
    ),
    Kind(
        code="W503",
        name="parameter-without-state",
        title="Some parameters have no optimizer state",
        meaning="Their moments begin anew; torch's loader may refuse.",
        causes="They are frozen, or never got a gradient; or a part of the state is missing.",
        fix="None is needed for frozen parameters.",
    ),
    Kind(
        code="N504",
        name="numbered-optimizer",
        title="The optimizer counts its parameters instead of naming them",
        meaning="It fits only a model with the same parameters in the same order.",
        causes="optimizer.state_dict() was saved as it is.",
        fix="load_state gives it names, from the model that it is loaded into.",
    ),
    Kind(
        code="W505",
        name="missing-rng",
        title="Random states of some ranks are not there",
        meaning="These ranks go on with other random numbers.",
        causes="Files were not copied from all nodes, or the save was cut off.",
        fix="Copy them; or accept that dropout and shuffling differ.",
    ),
    Kind(
        code="W506",
        name="missing-position",
        title="Positions in the data of some ranks are not there",
        meaning="These ranks see samples again, or leave some out.",
        causes="Files were not copied from all nodes, or the save was cut off.",
        fix="Copy them; or accept it.",
    ),
    Kind(
        code="E507",
        name="moment-shape",
        title="An optimizer's moment has another shape than its parameter",
        meaning="Loading fails, or the optimizer does in its next step.",
        causes="Model and optimizer are of different runs, or one was resized.",
        fix="Make sure that both are of one save.",
    ),
    Kind(
        code="W508",
        name="bad-trainer-state",
        title="trainer_state.json is broken, or of another step",
        meaning="The Trainer stops when it reads it, or goes on counting from another step than that of the weights.",
        causes="The save was cut off, the file was copied from another checkpoint, or the folder was renamed.",
        fix="Copy the file from where it was saved, or give the folder its name back; otherwise take the checkpoint "
        "before this one.",
    ),
    Kind(
        code="E601",
        name="bad-index",
        title="The index cannot be read",
        meaning="Loaders that follow it stop; fsdp-ckpt goes by the files.",
        causes="It was cut off, or edited by hand.",
        fix="Write it anew from what the files hold.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="E602",
        name="not-in-index",
        title="Tensors that the index does not name",
        meaning="Loaders that follow the index leave them as they were.",
        causes="Index and files are of different saves.",
        fix="Write it anew from what the files hold, if they are of one save.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="W603",
        name="wrong-total-size",
        title="The index tells a wrong total size",
        meaning="Loaders may plan with too little or too much memory; the tensors are not touched by it.",
        causes="The dtype was changed without the index, or tied weights were counted twice.",
        fix="Write it anew from what the files hold.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="E604",
        name="missing-index",
        title="Numbered files without an index",
        meaning="transformers finds no weights in it; fsdp-ckpt reads all files.",
        causes="The index was not copied along.",
        fix="Write it anew from what the files hold.",
        command="fsdp-ckpt repair {path}",
    ),
    Kind(
        code="N701",
        name="needs-torch-2.15",
        title="Only torch 2.15 and newer can read the metadata",
        meaning='Older ones stop with "too many values to unpack", or "metadata is None".',
        causes="torch 2.15 writes one more field than its forerunners can read.",
        fix="Write the metadata anew for an older torch; the data stay as they are.",
        command="fsdp-ckpt repair {path} --for-torch 2.9",
    ),
    Kind(
        code="N702",
        name="needs-python-3.13",
        title="Only Python 3.13 and newer can read the metadata with torch",
        meaning="Older ones stop with \"No module named 'pathlib._local'\".",
        causes="Python 3.13 keeps the path that is recorded in them in a class of its own.",
        fix="Write the metadata anew; the data stay as they are.",
        command="fsdp-ckpt repair {path} --for-torch 2.9",
    ),
    Kind(
        code="N703",
        name="foreign-classes",
        title="The metadata need classes of another package",
        meaning="torch alone cannot read them; fsdp-ckpt can.",
        causes="Megatron-core, OLMo-core and ByteCheckpoint put classes of their own into them.",
        fix="Merge it, or write the metadata anew for torch.",
        command="fsdp-ckpt repair {path} --for-torch 2.9",
    ),
    Kind(
        code="N704",
        name="metadata-per-rank",
        title="Each rank wrote its own metadata",
        meaning="torch before 2.9 finds nothing; dcp_to_torch_save takes rank 0's alone, and leaves the rest of every "
        "tensor as it was in memory.",
        causes="use_collectives=False.",
        fix="Merge it, or put the metadata together.",
        command="fsdp-ckpt repair {path} --for-torch 2.9",
    ),
    Kind(
        code="N705",
        name="safetensors-items",
        title="No version of torch can read its tensors",
        meaning="torch writes them so, but does not read them; fsdp-ckpt can.",
        causes="SerializationFormat.SAFETENSORS was given to torch's FileSystemWriter.",
        fix="Merge it, and save without that option.",
        command="fsdp-ckpt merge {path} OUT",
    ),
)
