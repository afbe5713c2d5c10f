"""The GPU as NVML reports it: readings, faults, events, and the watch thread."""

import sys
import threading

import pytest
from structlog.testing import capture_logs

from eventually import eventually
from fake_nvml import FakeNvml
from gpu_pool.worker import nvml_gpu
from gpu_pool.worker.gpu_faults import EARLIER_ERRORS, ECC, NEEDS_RESET, NOT_REMAPPED, TO_REMAP
from gpu_pool.worker.gpu_watch import GpuWatch
from gpu_pool.worker.nvml_gpu import FATAL_XIDS, NO_GPU, OFF_THE_BUS, UNTIL_RESET, NvmlGpu, gpu_id_of, gpu_of
from scheduler.protocol.pool_view import GpuReading


@pytest.mark.parametrize(
    ("backend", "device", "visible", "place"),
    [
        ("tiny", "cuda:3", None, "3"),
        ("tiny", "cuda:1", "GPU-a, GPU-b", "GPU-b"),
        ("tiny", "cuda:2", "4,6", None),
        ("tiny", "cuda", "", None),
        ("tiny", "cpu", None, None),
        ("simulated:50", "auto", None, None),
        ("openai:http://host/v1", "auto", None, None),
        ("mine:function", "auto", None, "0"),
    ],
)
def test_gpu_of_a_model(backend: str, device: str, visible: str | None, place: str | None) -> None:
    """CUDA counts the devices of CUDA_VISIBLE_DEVICES; some backends use no GPU."""
    assert gpu_id_of(backend, device, visible) == place


def test_unsupported_values_are_zero() -> None:
    """Some cards report no ECC, memory, utilization or name; that is no fault."""
    nvml = FakeNvml()
    assert NvmlGpu(nvml, "0").read() == GpuReading(
        0.97, 3072, 81920, 61, 0, "", name="NVIDIA H100", address="00000000:3B:00.0"
    )
    names = ("TotalEccErrors", "UtilizationRates", "MemoryInfo", "RetiredPagesPendingStatus", "RemappedRows")
    names += ("Name", "PciInfo")
    nvml.failing = {f"nvmlDeviceGet{name}": nvml.NVML_ERROR_NOT_SUPPORTED for name in names}

    assert NvmlGpu(nvml, "GPU-1").read() == GpuReading(0.0, 0, 0, 61, 0, "")


@pytest.mark.parametrize(
    ("ecc", "retiring", "pending", "failed", "fault", "note"),
    [
        (2, 0, 0, 0, "", EARLIER_ERRORS),
        (3, 0, 1, 0, ECC, TO_REMAP),
        (2, 1, 0, 0, NEEDS_RESET, EARLIER_ERRORS),
        (2, 0, 1, 1, "", NOT_REMAPPED),
        (0, 0, 1, 0, "", TO_REMAP),
    ],
)
def test_memory_errors_and_repairs(ecc: int, retiring: int, pending: int, failed: int, fault: str, note: str) -> None:
    """After a start with two errors: the fault is for the worker, the note for the operator."""
    nvml = FakeNvml()
    nvml.ecc = 2
    device = NvmlGpu(nvml, "0")
    device.read()
    nvml.ecc, nvml.retiring, nvml.rows = ecc, retiring, [0, 1, pending, failed]

    assert (device.read().fault, device.read().note) == (fault, note)


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceRegisterEvents"])
@pytest.mark.parametrize(("error", "fault"), [("GPU_IS_LOST", OFF_THE_BUS), ("RESET_REQUIRED", UNTIL_RESET)])
def test_lost_gpu_is_a_fault(name: str, error: str, fault: str) -> None:
    """Whichever call reports it first."""
    nvml = FakeNvml()
    nvml.failing[name] = getattr(nvml, f"NVML_ERROR_{error}")

    assert NvmlGpu(nvml, "0").read().fault == fault


@pytest.mark.parametrize(("xid", "waits"), [(13, [1.0]), (31, [1.0]), *((xid, []) for xid in FATAL_XIDS)])
def test_xid_events(xid: int, waits: list[float]) -> None:
    """Hardware Xids are faults and are read at once; after others the rest of the interval is waited."""
    nvml, waited = FakeNvml(), list[float]()
    device = NvmlGpu(nvml, "0")
    nvml.xids = [xid]

    device.wait(1.0, waited.append)

    assert (device.read().fault, waited) == (FATAL_XIDS.get(xid, ""), waits)


@pytest.mark.parametrize("name", ["nvmlEventSetCreate", "nvmlEventSetWait_v2"])
def test_without_events_it_waits_by_itself(name: str) -> None:
    """As under WSL, whose driver has no events."""
    nvml, waited = FakeNvml(), list[float]()
    nvml.failing[name] = nvml.NVML_ERROR_NOT_SUPPORTED

    NvmlGpu(nvml, "0").wait(1.0, waited.append)

    assert waited == [1.0]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByIndex", None])
def test_missing_driver_or_library_is_no_fault(monkeypatch: pytest.MonkeyPatch, failing: str | None) -> None:
    """There is no reading then; the library is optional (None: not installed)."""
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_of("tiny", "cuda")() is not None
    if failing:
        nvml.failing[failing] = 9
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)

    assert gpu_of("tiny", "cuda")() is None


@pytest.mark.parametrize(
    ("backend", "device", "visible", "library", "level"),
    [
        ("mine:function", "cuda", "0", True, "warning"),
        ("mine:function", "cuda", "0", False, "warning"),
        ("mine:function", "cuda:1", "0", True, "warning"),
        ("mine:function", "auto", "0", True, "info"),
        ("simulated:50", "cuda", "", True, None),
    ],
)
def test_a_named_gpu_that_is_missing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str, visible: str, library: bool, level: str | None
) -> None:
    """A Python function on the CPU would only be slow. `auto` chooses the CPU; some backends use no GPU."""
    nvml = FakeNvml()
    nvml.failing["nvmlInit"] = 9
    monkeypatch.setitem(sys.modules, "pynvml", nvml if library else None)
    monkeypatch.setattr(nvml_gpu, "DRIVER", ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    with capture_logs() as logs:
        assert gpu_of(backend, device)() is None

    assert [each["log_level"] for each in logs if each["event"] == NO_GPU] == ([level] if level else [])


async def test_watch_reads_in_a_thread_and_reports_changes_on_the_event_loop() -> None:
    """Only changes are reported; a fault is reported at once and stays; the library is closed at the end."""
    nvml, reports, threads = FakeNvml(), list[bool](), set[int]()
    nvml.failing["nvmlEventSetCreate"] = nvml.NVML_ERROR_NOT_SUPPORTED

    def changed(*, at_once: bool) -> None:
        reports.append(at_once)
        threads.add(threading.get_ident())

    watch = GpuWatch(lambda: NvmlGpu(nvml, "0"), changed, every_s=0.01)
    watch.start()
    await eventually(lambda: nvml.calls.count("nvmlDeviceGetTemperature") > 3, "it was read several times")
    assert watch.reading is not None
    assert (watch.reading.temperature_c, watch.usable.is_set(), reports) == (61, True, [False])

    nvml.ecc = 1
    await eventually(lambda: not watch.usable.is_set(), "the GPU is out")
    nvml.ecc = 0
    await eventually(lambda: watch.reading and not watch.reading.ecc_uncorrected, "it was read again")
    watch.stop()

    assert (watch.reading.fault, watch.usable.is_set(), reports.count(True)) == (ECC, False, 1)
    assert threads == {threading.get_ident()}
    assert threading.get_ident() not in nvml.threads
    await eventually(lambda: "nvmlShutdown" in nvml.calls, "the library is closed")
