"""Check a checkpoint: all of its bytes, beside reading them; and the metadata of very many chunks."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from benchmarks.cases import TOOL, Case, Settings
from benchmarks.inputs import FOLDER_NAME, checkpoint_input, metadata_input
from benchmarks.llama import Llama
from benchmarks.measure import Command
from benchmarks.synthetic import Synthetic
from fsdp_ckpt.units import format_size

CAT, DEEP, VALUES = "cat", "fsdp-ckpt validate --deep", "fsdp-ckpt validate --level geometry --values"
NO_BYTES = "fsdp-ckpt validate --level geometry"
"""Reads nothing but the metadata: what of the other two is start-up."""
SPARSE = Synthetic.of_chunks(1_000_000)
GEOMETRY = f"fsdp-ckpt validate --level geometry, {SPARSE.num_chunks:,} chunks"


def deep_case(settings: Settings) -> Case:
    """Compare every checksum, look at every value, beside `cat` of the same files."""
    model = Llama.fit(settings.size_bytes // 2)
    folder = settings.work / "checked"
    source, payload = str(folder / FOLDER_NAME), 2 * model.num_elements
    return Case(
        title=f"Read all of a checkpoint of 2 ranks, {format_size(payload)} of bfloat16 in {model.num_tensors} tensors",
        inputs=(checkpoint_input(folder, model, "bfloat16"),),
        commands=(
            Command(name=CAT, argv=("sh", "-c", 'cat "$1"/* > /dev/null', "sh", source)),
            Command(name=NO_BYTES, argv=(TOOL, "validate", source, "--level", "geometry", "-q")),
            Command(name=DEEP, argv=(TOOL, "validate", source, "--deep", "-q")),
            Command(name=VALUES, argv=(TOOL, "validate", source, "--level", "geometry", "--values", "-q")),
        ),
        ratios=((DEEP, CAT), (VALUES, CAT)),
        rounds=settings.rounds,
        payload_bytes=payload,
    )


def geometry_case(settings: Settings) -> Case:
    """Check that a million chunks make up their tensors and lie in their files."""
    folder = settings.work / "sparse-checked"
    apparent = format_size(SPARSE.num_ranks * SPARSE.file_bytes)
    return Case(
        title=f"Check the metadata of {SPARSE.num_ranks:,} ranks, {apparent} in sparse files",
        inputs=(metadata_input(folder, SPARSE),),
        commands=(Command(name=GEOMETRY, argv=(TOOL, "validate", str(folder), "--level", "geometry", "-q")),),
        rounds=min(3, settings.rounds),
        warm_ups=0,
    )


CASES: Mapping[str, Callable[[Settings], Case]] = MappingProxyType(
    {"validate": deep_case, "validate-scale": geometry_case}
)
