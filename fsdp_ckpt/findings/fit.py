"""8xx: whether a checkpoint fits what it is to be loaded into."""

from __future__ import annotations

from fsdp_ckpt.findings.kind import Kind

__all__ = ["KINDS"]

KINDS = (
    Kind(
        code="E801",
        name="missing-key",
        title="The model has a tensor that the checkpoint lacks",
        meaning="Loading fails, or leaves the tensor as it was.",
        causes="Another model, another version of it, a head or adapter that was added, or names with a prefix.",
        fix="Load with strict=False if the tensor is to begin anew.",
    ),
    Kind(
        code="W802",
        name="unexpected-key",
        title="The checkpoint has a tensor that the model lacks",
        meaning="load_state refuses it unless strict=False; torch's loader leaves it out without a word.",
        causes="Another model, another version of it, or names with a prefix.",
        fix="Load with strict=False if it is not needed.",
    ),
    Kind(
        code="E803",
        name="shape-differs",
        title="A tensor has another shape than the model",
        meaning="Loading fails.",
        causes="Another size of model, or a vocabulary that was extended or padded.",
        fix="For rows that were added, load_state has resize=.",
    ),
    Kind(
        code="W804",
        name="dtype-differs",
        title="A tensor has another element type than the model",
        meaning="It is converted while it is loaded.",
        causes="Saved from a model in another precision.",
        fix="None is needed if it was meant.",
    ),
    Kind(
        code="E805",
        name="no-optimizer",
        title="There is no optimizer in it",
        meaning="Training cannot be resumed; the weights can be used to begin anew.",
        causes="Only the model was saved, or merged.",
        fix="Take a checkpoint with an optimizer, or begin anew from these weights.",
    ),
    Kind(
        code="E806",
        name="prefix-differs",
        title="Names have another prefix than the model's",
        meaning="Loaders that go by names find nothing.",
        causes="Saved from the model within another one, or without it: a base model and one with a head.",
        fix="Rename them when merging, by the rule in the message.",
    ),
    Kind(
        code="N807",
        name="rng-world-size",
        title="Random states are of another number of ranks",
        meaning="Ranks without one keep their own; those of ranks that are no more are not used.",
        causes="The job runs on another number of ranks.",
        fix="None is needed; the run is not the same in every bit.",
    ),
    Kind(
        code="E808",
        name="position-world-size",
        title="Positions in the data are of another number of ranks",
        meaning="load_state refuses to guess where each rank goes on.",
        causes="The job runs on another number of ranks.",
        fix='load_state(…, positions="fresh") leaves the data loader at its beginning.',
    ),
    Kind(
        code="E809",
        name="torch-too-old",
        title="This version of torch cannot read it",
        meaning="Loading stops with an error about the metadata.",
        causes="A newer torch, or another Python, has written it.",
        fix="Write the metadata anew, in a form that torch 2.3 and all newer ones read; the data stay as they are.",
        command="fsdp-ckpt repair {path} --for-torch 2.3",
    ),
    Kind(
        code="E810",
        name="other-state-dict-type",
        title="The configuration asks for another kind of state dict",
        meaning="Accelerate looks for files of other names, and finds nothing; load_state takes either.",
        causes="fsdp_state_dict_type was changed after the save.",
        fix="Set it as it was, or load with load_state.",
    ),
    Kind(
        code="E811",
        name="other-world-size",
        title="It can be loaded on the same number of ranks only",
        meaning="Loading on another number fails, or gives wrong values; load_state refuses it.",
        causes="Each rank saved its slices of FSDP1's flat parameters as plain tensors: LOCAL_STATE_DICT, or "
        "state_dict() of the optimizer as it is.",
        fix="Load it with what saved it, on as many ranks, and save with SHARDED_STATE_DICT.",
    ),
    Kind(
        code="N812",
        name="scheduler-pace",
        title="The scheduler counts the steps of another number of ranks",
        meaning="Accelerate's schedulers take as many steps at a time as there are ranks: from here on the learning "
        "rate changes faster, or slower.",
        causes="The job runs on another number of ranks.",
        fix="None is needed for schedulers that step once per step of training, or with split_batches=True.",
    ),
    Kind(
        code="N813",
        name="file-per-rank",
        title="One file for each rank",
        meaning="load_state loads it on any number of ranks; torch.load and Accelerate on as many as saved it.",
        causes="Saved with use_dcp=False, or by a trainer that calls torch.save on every rank.",
        fix="None is needed for load_state; or save SHARDED_STATE_DICT with torch.distributed.checkpoint.",
    ),
    Kind(
        code="E814",
        name="no-model",
        title="There are no model weights in it",
        meaning="Training cannot be resumed: the optimizer's state is of no use without the weights.",
        causes="The folder or file of the model was not copied along, or was removed.",
        fix="Copy it from where it was saved; otherwise take the checkpoint before this one.",
    ),
    Kind(
        code="E815",
        name="torch-lacks-items",
        title="This version of torch cannot read what is in it",
        meaning="Loading stops with an error. New metadata cannot change that.",
        causes="Tensors or metadata are of a form that this torch does not know, or has not yet learned to read.",
        fix="Merge it: the safetensors files that come out need no certain torch. Where the element type is too new, "
        "give --dtype as well.",
        command="fsdp-ckpt merge {path} OUT",
    ),
    Kind(
        code="N816",
        name="compared-in-part",
        title="Not all of it was compared",
        meaning="What was not compared may fit or not.",
        causes="How such a model is built is not in its configuration, but in its code.",
        fix="Compare with weights of the model: --against model.safetensors.",
    ),
    Kind(
        code="N817",
        name="adapter",
        title="An adapter, not a whole model",
        meaning="It is loaded into a base model by PEFT, not in place of it.",
        causes="Only the adapter was trained, and saved.",
        fix="None is needed.",
    ),
)
