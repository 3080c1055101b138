"""Bytes of downloads are counted by what huggingface_hub takes for a progress bar, whichever way they come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from huggingface_hub.utils.tqdm import _get_progress_bar_context

from fsdp_ckpt.ops.sharing.download import _Bar, is_reserved
from fsdp_ckpt.ops.sharing.interruptible import Stop, StoppedError
from fsdp_ckpt.run.progress import Meter


@pytest.fixture
def bar() -> type[_Bar]:
    return type("_BarOfFile", (_Bar,), {"meter": Meter(100, None), "stop": Stop()})


def test_a_second_try_counts_only_what_is_new(bar: type[_Bar]) -> None:
    for initial, pieces in ((0, [30, 30]), (60, [20]), (0, [50, 50])):  # broken, resumed, and once more from the start
        with _get_progress_bar_context(desc="x", log_level=40, total=100, initial=initial, tqdm_class=bar) as shown:
            for piece in pieces:
                shown.update(piece)
        assert bar.meter.done_bytes <= 100
    assert bar.meter.done_bytes == 100


def test_of_xet_the_file_counts_and_not_what_is_on_the_wire(bar: type[_Bar]) -> None:
    reporting = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting", reason="older huggingface_hub")
    reporter = reporting.XetDownloadProgressReporter(
        reconstruction_desc="x", transfer_desc="y", total=100, log_level=40, name="n", tqdm_class=bar
    )
    with reporter as shown:
        for done, transferred in ((10, 30), (60, 80), (100, 90)):
            report = SimpleNamespace(
                total_bytes=100, total_bytes_completed=done, total_bytes_completion_rate=5.0,
                total_transfer_bytes=90, total_transfer_bytes_completed=transferred,
                total_transfer_bytes_completion_rate=4.0,
            )  # fmt: skip
            shown.update_progress(report, {})
            assert bar.meter.done_bytes == done


def test_a_download_that_is_to_stop_does_so_at_the_next_piece(bar: type[_Bar]) -> None:
    shown = bar()
    shown.update(10)
    bar.stop.ask()
    with pytest.raises(StoppedError):
        shown.update(10)


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("model.safetensors", False), (".metadata", False), ("a/.hf_metadata/x.json", False), ("x.done", False),
        ("a.part", False), (".model.safetensors.done", True), ("a/.x.done", True), (".fsdp-ckpt-lock", True),
        ("a/.out.fsdp-ckpt-0123/x", True), (".arriving/x", True), (".saving.fsdp-ckpt-0123", False),
    ],
)  # fmt: skip
def test_names_of_unfinished_results_are_known_and_marks_of_remote_saves_are_none(name: str, reserved: bool) -> None:
    assert is_reserved(name) is reserved
