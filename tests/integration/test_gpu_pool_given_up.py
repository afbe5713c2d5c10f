"""A model process that was killed in the middle of a batch gets no other one, though its end is not noticed yet."""

import os
import signal
import time

import pytest

from eventually import eventually
from gpu_pool.config import WorkerConfig
from gpu_pool.model_process.handle import ModelHung, ModelLaunch
from gpu_pool.model_process.supervisor import ModelSupervisor
from gpu_pool.worker.execution import Execution, NotStarted
from scheduler.payload import Payload, encode_payload
from scheduler.protocol.batches import ClaimedRequest
from scheduler.request_id import new_request_id


def batch() -> list[ClaimedRequest]:
    return [ClaimedRequest(new_request_id(), 4000, 1, encode_payload(Payload("simulated", "abc", {})))]


async def test_a_hung_model_gets_no_other_batch() -> None:
    """The next one is handed back uncounted: on a process that is dying it would cost its requests an attempt."""
    supervisor = ModelSupervisor(ModelLaunch("simulated:10"), 10.0, lambda: None)
    supervisor.start()
    await eventually(supervisor.ready.is_set, "the model is ready")
    execution = Execution(WorkerConfig("unix://none", "w1", gpu_timeout_ms=300), supervisor)
    assert supervisor.model is not None
    os.kill(supervisor.model.pid, signal.SIGSTOP)

    with pytest.raises(ModelHung):
        await execution.run(batch(), time.monotonic(), lambda: True)

    assert (supervisor.status, supervisor.model, supervisor.ready.is_set()) == ("down", None, False)
    with pytest.raises(NotStarted):
        await execution.run(batch(), time.monotonic(), lambda: True)
    await eventually(supervisor.ready.is_set, "another one is ready")
    await supervisor.close()
