"""Load for teams that use Locust: requests of three tiers at a fixed rate for each user.

    pip install locust
    TIERLANE_KEYS=<key>,<key>,<key> locust -f tools/bench/locustfile.py --headless -H http://127.0.0.1:8080 \
        --users 100 --spawn-rate 100 --run-time 30s

Each user sends 10 requests/s, so 100 users send 1,000/s, if the machine can. Locust is not a dependency of Tierlane. Its own
CPU is part of what it measures: on two cores that also ran the system, 986 requests/s with p50 44 and p99 110 ms and 540 us
of its CPU for each, beside 994/s, 25 and 50 ms, and 111 us of `tierlane bench`.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import os
from itertools import cycle

from locust import FastHttpUser, constant_throughput, task

KEYS = cycle(os.environ["TIERLANE_KEYS"].split(","))
BODY = {"input": "hello"}


class Customer(FastHttpUser):
    """One client with the next of the keys. Every response but a 200 is a failure, named by its error code."""

    wait_time = constant_throughput(10)

    def on_start(self) -> None:
        """Choose the key."""
        self.headers = {"Authorization": f"Bearer {next(KEYS)}"}

    @task
    def infer(self) -> None:
        """Send one request."""
        with self.client.post("/v1/inference", json=BODY, headers=self.headers, catch_response=True) as response:
            if response.status_code == 200:
                response.success()
            else:
                response.failure(response.json()["error"]["code"] if response.content else f"{response.status_code}")
