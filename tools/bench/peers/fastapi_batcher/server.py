"""The job on FastAPI and uvicorn with a micro-batcher of one's own: two processes, half of the GPUs in each."""
# ruff: noqa: INP001 - a folder of scripts, not a package

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request
from micro_batch import MicroBatcher
from pydantic import BaseModel
from reversal import GPUS, PORT

PROCESSES = 2
BACKLOG = 4096


class Job(BaseModel):
    """A request."""

    input: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One batcher for each process."""
    app.state.batcher = MicroBatcher(GPUS // PROCESSES)
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/inference", response_model=None)
async def infer(job: Job, request: Request) -> dict[str, str]:
    """One request."""
    return {"output": await request.app.state.batcher.submit(job.input)}


if __name__ == "__main__":
    uvicorn.run(
        "server:app",
        host="127.0.0.1",
        port=PORT,
        workers=PROCESSES,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        backlog=BACKLOG,
    )
