"""Configurations of roles for tests, with the defaults of the declared settings."""

from dataclasses import replace
from typing import Any

from gateway.config import BatchConfig, GatewayConfig, GrpcConfig, JobConfig, JwtConfig, ResponseStoreConfig
from gpu_pool.config import Access, WorkerConfig
from scheduler.autoscale import ScaleRules
from tierlane.roles import gateway, worker
from tierlane.settings.model import Settings

DEFAULTS = Settings.model_validate({})
GATEWAY = gateway.gateway_config(DEFAULTS)
WORKER = worker.worker_config(DEFAULTS)
LEASE_MS, GONE_MS, PASS_MS = DEFAULTS.lease_ms, DEFAULTS.gone_ms, DEFAULTS.reap_ms
REPLAYS = GATEWAY.replays
BACKGROUND_SHARE = DEFAULTS.background_share


def gateway_config(**changes: Any) -> GatewayConfig:
    """A gateway on any port, without directories, jobs, and stores."""
    bare = {"gateway_id": "g1", "port": 0, "reuse_port": False, "data_dir": None, "metrics_dir": None, "jobs": None}
    return replace(GATEWAY, **bare | changes)


def job_config(database_url: str, **changes: Any) -> JobConfig:
    """Jobs of this database."""
    assert GATEWAY.jobs is not None
    return replace(GATEWAY.jobs, database_url=database_url, **changes)


def batch_config(database_url: str, **changes: Any) -> BatchConfig:
    """Files and batches of this database."""
    return replace(GATEWAY.batches, database_url=database_url, **changes)


def response_config(database_url: str, **changes: Any) -> ResponseStoreConfig:
    """Stored responses of this database."""
    return replace(GATEWAY.responses, database_url=database_url, **changes)


def grpc_config(**changes: Any) -> GrpcConfig:
    """A gRPC server on any port, without TLS."""
    return GrpcConfig(**{"port": 0, "tls_cert": None, "tls_key": None, "tls_ca": None} | changes)


def jwt_config(**changes: Any) -> JwtConfig:
    """Tokens for this service."""
    settings = DEFAULTS.model_copy(update={"jwt_audience": "tierlane"})
    return replace(gateway.jwt_config(settings, "jwks.json"), **changes)


def worker_config(redis_url: str, worker_id: str = "w1", **changes: Any) -> WorkerConfig:
    """A worker with batches of 32 that does not measure its model."""
    small = {"redis_url": redis_url, "worker_id": worker_id, "max_batch_size": 32, "measure_at_start": False}
    return replace(WORKER, **small | changes)


def endpoint_access(api_key: str = "", ca_file: str = "", **changes: Any) -> Access:
    """Access to an endpoint."""
    return replace(WORKER.endpoint, api_key=api_key, ca_file=ca_file, **changes)


def scale_rules(**changes: Any) -> ScaleRules:
    """The rules of the scale policy."""
    return replace(DEFAULTS.scale_rules, **changes)
