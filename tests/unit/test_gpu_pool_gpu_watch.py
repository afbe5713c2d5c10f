"""The thread that looks at a GPU: readings on the event loop, faults that stay, an end."""

import threading

from eventually import eventually
from fake_nvml import FakeNvml
from gpu_pool.worker.gpu import ECC, GpuWatch, NvmlGpu


def without_events() -> FakeNvml:
    """A driver that is asked once in a while: the other kind is waited for inside it."""
    nvml = FakeNvml()
    nvml.failing["nvmlEventSetCreate"] = nvml.NVML_ERROR_NOT_SUPPORTED
    return nvml


class Heard:
    """What was told, and from which thread."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.threads: set[int] = set()

    def __call__(self, *, at_once: bool) -> None:
        self.told.append(at_once)
        self.threads.add(threading.get_ident())


async def test_readings_come_to_the_event_loop_from_a_thread() -> None:
    """The library is called elsewhere, `changed` here; and only when something changed."""
    nvml, heard = without_events(), Heard()
    watch = GpuWatch(lambda: NvmlGpu(nvml, "0"), heard, every_s=0.01)

    watch.start()
    await eventually(lambda: nvml.calls.count("nvmlDeviceGetTemperature") > 3, "it was looked at some times")
    watch.stop()

    assert watch.reading is not None
    assert (watch.reading.temperature_c, watch.well.is_set()) == (61, True)
    assert heard.told == [False]
    assert heard.threads == {threading.get_ident()}
    assert threading.get_ident() not in nvml.threads
    await eventually(lambda: "nvmlShutdown" in nvml.calls, "the library is let go")


async def test_a_fault_is_told_at_once_and_stays() -> None:
    """No later reading makes the GPU well."""
    nvml, heard = without_events(), Heard()
    watch = GpuWatch(lambda: NvmlGpu(nvml, "0"), heard, every_s=0.01)
    watch.start()
    await eventually(lambda: watch.reading, "it was read")

    nvml.ecc = 1
    await eventually(lambda: not watch.well.is_set(), "it is out")
    nvml.ecc = 0
    await eventually(lambda: watch.reading and not watch.reading.ecc_uncorrected, "it was read again")
    watch.stop()

    assert watch.reading is not None
    assert watch.reading.fault == ECC
    assert not watch.well.is_set()
    assert heard.told.count(True) == 1


async def test_without_a_gpu_nothing_is_told() -> None:
    """And the thread ends."""
    heard = Heard()
    watch = GpuWatch(lambda: None, heard, every_s=0.01)

    watch.start()
    await eventually(lambda: "gpu-watch" not in {thread.name for thread in threading.enumerate()}, "it ended")

    assert (watch.reading, watch.well.is_set(), heard.told) == (None, True, [])
