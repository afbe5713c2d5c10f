"""A GPU through a library that stands for NVML: what is read, and what puts it out."""

import sys

import pytest

from fake_nvml import FakeNvml
from gpu_pool.worker.gpu import (
    BEFORE,
    ECC,
    FATAL_XIDS,
    NOT_REMAPPED,
    OFF_THE_BUS,
    TO_REMAP,
    UNTIL_RESET,
    WANTS_RESET,
    FaultCounts,
    NvmlGpu,
    fault_of,
    gpu_of,
    gpu_place,
    note_of,
)
from scheduler.protocol.pool_view import GpuReading


def pause(_: float) -> None:
    """No test waits."""


@pytest.mark.parametrize(
    ("backend", "device", "visible", "place"),
    [
        ("tiny", "auto", None, "0"),
        ("tiny", "cuda", None, "0"),
        ("tiny", "cuda:3", None, "3"),
        ("tiny", "cuda:1", "4,6", "6"),
        ("tiny", "cuda:1", "GPU-a, GPU-b", "GPU-b"),
        ("tiny", "cuda:2", "4,6", None),
        ("tiny", "cuda", "", None),
        ("tiny", "cpu", None, None),
        ("simulated:50", "auto", None, None),
        ("openai:http://host/v1", "auto", None, None),
        ("mine:function", "auto", "2", "2"),
    ],
)
def test_which_gpu_a_model_is_on(backend: str, device: str, visible: str | None, place: str | None) -> None:
    """CUDA counts what CUDA_VISIBLE_DEVICES shows; what runs elsewhere is on none."""
    assert gpu_place(backend, device, visible) == place


def test_a_reading() -> None:
    """Shares, MiB and degrees; no fault."""
    assert NvmlGpu(FakeNvml(), "0").read() == GpuReading(0.97, 3072, 81920, 61, 0, "")


def test_what_a_gpu_does_not_tell_is_zero() -> None:
    """Consumer cards have no ECC, some virtual ones no utilisation; that is no fault."""
    nvml = FakeNvml()
    names = ("TotalEccErrors", "UtilizationRates", "MemoryInfo", "RetiredPagesPendingStatus", "RemappedRows")
    nvml.failing = {f"nvmlDeviceGet{name}": nvml.NVML_ERROR_NOT_SUPPORTED for name in names}

    assert NvmlGpu(nvml, "GPU-1").read() == GpuReading(0.0, 0, 0, 61, 0, "")


def test_an_uncorrectable_error_puts_it_out_for_good() -> None:
    """One since the worker began, and even where the counter is set back."""
    nvml = FakeNvml()
    gpu = NvmlGpu(nvml, "0")
    assert gpu.read().fault == ""
    nvml.ecc = 2

    assert (gpu.read().ecc_uncorrected, gpu.read().fault) == (2, ECC)
    nvml.ecc = 0
    assert gpu.read().fault == ECC


def test_an_error_from_before_its_start_is_told_a_worker_and_no_more() -> None:
    """Only the driver's next load sets the count back: a new start would never help. The next error does put it out."""
    nvml = FakeNvml()
    nvml.ecc = 2
    gpu = NvmlGpu(nvml, "0")

    assert gpu.read() == GpuReading(0.97, 3072, 81920, 61, 2, "", BEFORE)
    nvml.ecc = 3
    assert gpu.read().fault == ECC


def test_what_the_driver_says_of_repairs_is_told() -> None:
    """Rows that are to be remapped, and pages that are to be retired."""
    nvml = FakeNvml()
    nvml.rows = [0, 1, 1, 0]
    gpu = NvmlGpu(nvml, "0")

    assert (gpu.read().fault, gpu.read().note) == ("", TO_REMAP)
    nvml.retiring = 1
    assert gpu.read().fault == WANTS_RESET


@pytest.mark.parametrize(
    ("began", "now", "fault", "note"),
    [
        (FaultCounts(), FaultCounts(), "", ""),
        (FaultCounts(), FaultCounts(1), ECC, BEFORE),
        (FaultCounts(2), FaultCounts(2), "", BEFORE),
        (FaultCounts(2), FaultCounts(), "", ""),
        (FaultCounts(2), FaultCounts(3, remapping=True), ECC, TO_REMAP),
        (FaultCounts(1, remapping=True), FaultCounts(1, remapping=True), "", TO_REMAP),
        (FaultCounts(1, retiring=True), FaultCounts(1, retiring=True), WANTS_RESET, BEFORE),
        (FaultCounts(1), FaultCounts(1, remapping=True, not_remapped=True), "", NOT_REMAPPED),
    ],
)
def test_what_counts_of_broken_memory_mean(began: FaultCounts, now: FaultCounts, fault: str, note: str) -> None:
    """For the worker that began with these, and for whoever looks after the machine."""
    assert (fault_of(began, now), note_of(now)) == (fault, note)


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceRegisterEvents"])
def test_a_gpu_that_the_driver_wants_reset(name: str) -> None:
    """It says so with every call."""
    nvml = FakeNvml()
    nvml.failing[name] = nvml.NVML_ERROR_RESET_REQUIRED

    assert NvmlGpu(nvml, "0").read().fault == UNTIL_RESET


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature", "nvmlDeviceRegisterEvents"])
def test_off_the_bus(name: str) -> None:
    """Whichever call says so first."""
    nvml = FakeNvml()
    nvml.failing[name] = nvml.NVML_ERROR_GPU_IS_LOST

    assert NvmlGpu(nvml, "0").read().fault == OFF_THE_BUS


@pytest.mark.parametrize(
    ("xid", "fault"), [(13, ""), (31, ""), (45, ""), *((xid, FATAL_XIDS[xid]) for xid in (48, 79, 94, 95))]
)
def test_what_the_driver_says(xid: int, fault: str) -> None:
    """Xids about the hardware put the GPU out, those about a program do not."""
    nvml = FakeNvml()
    gpu = NvmlGpu(nvml, "0")
    nvml.xids = [xid]

    gpu.wait(1.0, pause)

    assert gpu.read().fault == fault


def test_a_program_that_fails_again_and_again_is_not_read_as_often() -> None:
    """After an Xid that says nothing of the GPU the rest of the time is waited; after a fatal one, none."""
    nvml, waits = FakeNvml(), list[float]()
    gpu = NvmlGpu(nvml, "0")
    nvml.xids = [31, 95]

    gpu.wait(1.0, waits.append)
    gpu.wait(1.0, waits.append)

    assert waits == [1.0]


def test_without_events_it_is_waited_otherwise() -> None:
    """As under WSL, whose driver has none; the same where waiting for them fails."""
    for name in ("nvmlEventSetCreate", "nvmlEventSetWait_v2"):
        nvml, waits = FakeNvml(), list[float]()
        nvml.failing[name] = nvml.NVML_ERROR_NOT_SUPPORTED

        NvmlGpu(nvml, "0").wait(1.0, waits.append)

        assert waits == [1.0], name


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_is_not_there_is_no_fault(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Nothing is known of the GPU, and that is all."""
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_of("tiny", "cuda")() is not None

    nvml.failing[failing] = 9

    assert gpu_of("tiny", "cuda")() is None
    assert gpu_of("tiny", "cpu")() is None


def test_a_library_that_is_not_installed_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert gpu_of("tiny", "cuda")() is None
