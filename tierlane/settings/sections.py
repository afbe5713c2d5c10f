"""Sections of the settings (endpoint, jobs, autoscaling, further pools) and the defaults that depend on the host.

A model gets the host's CPU threads, shared by its workers, `tiny` gets one; a full batch is what a model can do in one
go without making its first member wait. The further pools of a local stack have the form that `parse_pools` reads.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings

from gateway.host_lists import host_list
from gateway.jobs.signature import secret_bytes
from scheduler.autoscale import ScaleRules

Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]


class EndpointSettings(BaseSettings):
    """A part of `Settings`."""

    endpoint_api_key: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    endpoint_ca_file: Path | None = None
    endpoint_cert_file: Path | None = None
    endpoint_key_file: Path | None = None
    endpoint_connect_ms: Milliseconds = 1000
    endpoint_first_byte_ms: Milliseconds | None = None
    endpoint_total_ms: Milliseconds | None = None
    endpoint_max_calls: Annotated[int, Field(ge=1, le=4096)] = 64
    endpoint_max_batches: Annotated[int, Field(ge=1, le=64)] = 8

    @property
    def endpoint_values(self) -> dict[str, Any]:
        """These as `Access` in gpu_pool has them."""
        names = (name for name in EndpointSettings.model_fields if getattr(self, name) is not None)
        return {name.removeprefix("endpoint_"): _plain(getattr(self, name)) for name in names}

    @field_validator("endpoint_api_key")
    @classmethod
    def _fits_into_a_header(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces")
        return value

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> Self:
        if self.endpoint_key_file and not self.endpoint_cert_file:
            raise ValueError("TIERLANE_ENDPOINT_CERT_FILE: must be set where TIERLANE_ENDPOINT_KEY_FILE is")
        return self


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


class JobSettings(BaseSettings):
    """A part of `Settings`."""

    job_deadline_ms: Milliseconds = 600_000
    job_result_ms: Milliseconds = 600_000
    callback_hosts: str = ""
    callback_secret: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    callback_private_addresses: bool = False
    callback_shared_signature: bool = False

    @property
    def callback_host_list(self) -> tuple[str, ...]:
        """The hosts one by one."""
        return host_list(self.callback_hosts)

    @property
    def callback_key(self) -> bytes:
        """What signs callbacks; empty where there are none."""
        secret = self.callback_secret.get_secret_value()
        return secret_bytes(secret) if secret else b""

    @field_validator("callback_hosts")
    @classmethod
    def _known_hosts(cls, value: str) -> str:
        host_list(value)
        return value

    @field_validator("callback_secret")
    @classmethod
    def _known_secret(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            secret_bytes(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.callback_hosts and not self.callback_secret.get_secret_value():
            raise ValueError("TIERLANE_CALLBACK_SECRET: must be set where TIERLANE_CALLBACK_HOSTS is")
        return self


TINY_BATCH_SIZE = 8  # On a CPU core; a GPU takes many times as much.
BATCH_SIZE = 32


def default_batch_size(backend: str) -> int:
    """The size for the backend of `--backend`."""
    return TINY_BATCH_SIZE if is_tiny(backend) else BATCH_SIZE


def is_tiny(backend: str) -> bool:
    """Whether it is the small model that ships with the project."""
    return backend.partition(":")[0] == "tiny"


def default_torch_threads(backend: str, workers: int = 1) -> int:
    """The number for the backend of `--backend`, where so many workers share the host.

    The matrices of `tiny` are so small that its threads wait for each other most of the time: on two busy cores 64 steps of 16
    rows took 7.2 s with two threads, and 0.9 s with one.
    """
    return 1 if is_tiny(backend) else max(1, (os.cpu_count() or 1) // workers)


_POOL = re.compile(r"\s*([A-Za-z0-9_-]{1,64})=(.+?)(?:\*(\d{1,3}))?\s*")
MOST_WORKERS = 256


class PoolsError(ValueError):
    """What was said of the pools cannot be meant; its text names the part."""


@dataclass(frozen=True)
class OtherPool:
    """One pool and its workers."""

    pool: str
    backend: str
    workers: int = 1

    def names(self) -> list[str]:
        """What its workers are called."""
        return [f"worker-{self.pool}-{number}" for number in range(1, self.workers + 1)]


def parse_pools(text: str, own: str) -> list[OtherPool]:
    """What `--pools` says, in its order. Raises PoolsError."""
    found = [_parsed(part) for part in text.split(",") if part.strip()]
    names = [own, *(each.pool for each in found)]
    for name in names:
        if names.count(name) > 1:
            raise PoolsError(f"the pool {name!r} is there twice")
    return found


def _parsed(part: str) -> OtherPool:
    match = _POOL.fullmatch(part)
    if match is None:
        raise PoolsError(f"{part.strip()!r} is not POOL=BACKEND or POOL=BACKEND*WORKERS")
    workers = int(match[3]) if match[3] else 1
    if not 1 <= workers <= MOST_WORKERS:
        raise PoolsError(f"{part.strip()!r}: workers must be from 1 to {MOST_WORKERS}")
    return OtherPool(match[1], match[2], workers)


_BOUNDS = re.compile(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*")


class ScaleSettings(BaseSettings):
    """A part of `Settings`."""

    autoscale: str = ""
    autoscale_wait_ms: Milliseconds = 500
    autoscale_need_ms: Milliseconds = 10_000
    autoscale_deep_ms: Milliseconds = 30_000
    autoscale_long_ms: Milliseconds = 60_000
    autoscale_busy_ms: Milliseconds = 300_000
    autoscale_calm_ms: Milliseconds = 900_000
    autoscale_cooldown_ms: Milliseconds = 60_000

    @property
    def scale_bounds(self) -> tuple[int, int]:
        """The least and the most workers of a pool."""
        return parse_bounds(self.autoscale) if self.autoscale else (1, MOST_WORKERS)

    @property
    def scale_rules(self) -> ScaleRules:
        """What the policy is told."""
        least, most = self.scale_bounds
        return ScaleRules(
            least=least,
            most=most,
            target_wait_s=self.autoscale_wait_ms / 1000,
            need_s=self.autoscale_need_ms / 1000,
            deep_s=self.autoscale_deep_ms / 1000,
            long_s=self.autoscale_long_ms / 1000,
            busy_s=self.autoscale_busy_ms / 1000,
            calm_s=self.autoscale_calm_ms / 1000,
            cooldown_s=self.autoscale_cooldown_ms / 1000,
        )

    @field_validator("autoscale")
    @classmethod
    def _bounds_are_meant(cls, value: str) -> str:
        if value:
            parse_bounds(value)
        return value


def parse_bounds(text: str) -> tuple[int, int]:
    """What `--autoscale` says. Raises ValueError."""
    match = _BOUNDS.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_WORKERS:
        raise ValueError(f"must be MIN:MAX, whole numbers with 1 <= MIN <= MAX <= {MOST_WORKERS}")
    return int(match[1]), int(match[2])
