"""Rows of the catalog without effect: each kind with the least rows that show it, and rows next to it that have one."""

from typing import Any
from uuid import UUID

import pytest

from ledger.admin.effects import CatalogRows, Deployment, rows_without_effect
from ratelimit.limits import LIMIT_COLUMNS
from tierlane.admin.runner import MOST_NOTES, deployment_of, notes_of
from tierlane.settings.model import Settings

ACME = UUID(int=1)
SECRET = f"whsec_{'aGVsbG8gd29ybGQg' * 3}"
GATEWAYS = Deployment(can_sign=True, pool="default", default_model=None)
NONE: dict[str, Any] = {column.name: None for column in LIMIT_COLUMNS}
LIMITS = {"requests_per_second": 10.0, "burst": 20.0, "max_concurrency": 9}
AUXILIARY = ("auxiliary_requests_per_second", "auxiliary_burst")
UNSET = dict.fromkeys((*AUXILIARY, "max_queue_ms", "shed_depth", "shed_wait_ms", "slo_ms"))
TIER = {**NONE, **LIMITS, **UNSET, "name": "free", "max_queue_depth": 100}
CUSTOMER = {**NONE, "id": ACME, "name": "acme", "tier": "free", "callback_hosts": None, "alert_url": None, "spread": 1}
KEY = {"id": "0123456789ab", "customer_id": ACME, "requests_per_second": None, "burst": None, "quotas": None}
MODEL = {"name": "tiny", "pool": "default", "enabled": True, "cache_scope": "customer", "cache_ttl_s": 0}
PRICE = {"model": "tiny", "state": "now", "usd_per_gpu_s": 1, "usd_per_1000_tokens": 0}
OWN = {"customer_id": ACME, "tier": None, "customer": "acme"}
OF_TIER = {"customer_id": None, "tier": "free", "customer": None}


def catalog(**changed: list[dict[str, Any]]) -> CatalogRows:
    """One row of each table, each with the columns of the given ones."""
    whole = {"tiers": TIER, "models": MODEL, "prices": PRICE, "customers": CUSTOMER, "keys": KEY, "quotas": OWN}
    rows = {table: [row | each for each in changed.get(table, [{}])] for table, row in whole.items()}
    rows["quotas"] = [{"id": number} | row for number, row in enumerate(rows["quotas"], 1) if "quota" in row]
    return CatalogRows(**rows)


def kinds(rows: CatalogRows, deployment: Deployment = GATEWAYS) -> list[str]:
    return [finding.kind for finding in rows_without_effect(rows, deployment)]


def quotas(*texts: str, **tier: str) -> list[dict[str, Any]]:
    return [OWN | {"quota": text} for text in texts] + [OF_TIER | {"quota": text} for text in tier.values()]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ({}, []),
        ({"tiers": [{"slo_ms": 800}]}, ["objective"]),
        ({"tiers": [{"slo_ms": 800, "shed_wait_ms": 800}]}, ["objective"]),
        ({"tiers": [{"slo_ms": 800, "shed_wait_ms": 500}]}, []),
        ({"tiers": [{"slo_ms": 800, "max_queue_ms": 700}]}, []),
        ({"tiers": [{"slo_ms": 800, "shed_depth": 100}]}, []),
        ({"tiers": [{"shed_depth": 101}]}, ["shedding"]),
        ({"tiers": [{"auxiliary_requests_per_second": 10.0}]}, ["auxiliary limit"]),
        ({"tiers": [{"auxiliary_requests_per_second": 9.0, "auxiliary_burst": 30.0}]}, ["auxiliary limit"]),
        ({"tiers": [{"auxiliary_requests_per_second": 9.0, "auxiliary_burst": 19.0}]}, []),
        ({"models": [{}, {"name": "big"}]}, ["default model", "default model"]),
        ({"models": [{}, {"name": "big", "pool": "other"}]}, []),
        ({"models": [{}, {"name": "big", "enabled": False}]}, []),
        ({"models": [{"cache_scope": "global"}]}, ["cache"]),
        ({"models": [{"cache_scope": "global", "cache_ttl_s": 60}]}, []),
        ({"customers": [{"spread": 8}]}, ["spread"]),
        ({"customers": [{"spread": 3}]}, []),
        ({"customers": [{"callback_hosts": "hooks.example"}]}, []),
        ({"keys": [{"requests_per_second": 10.0, "burst": 20.0}]}, ["key limit"]),
        ({"keys": [{"requests_per_second": 10.0, "burst": 19.0}]}, []),
        (
            {"keys": [{"requests_per_second": 5.0, "burst": 20.0}], "customers": [{"requests_per_second": 4.0}]},
            ["key limit"],
        ),
        ({"quotas": quotas("5 usd/day")}, []),
        ({"quotas": quotas("5 usd/day"), "prices": []}, ["money"]),
        ({"quotas": quotas("5 usd/day"), "prices": [{"state": "past"}]}, ["money"]),
        ({"quotas": quotas("5 usd/day"), "prices": [{"state": "later"}]}, []),
        ({"quotas": quotas("5 usd/day"), "prices": [{"usd_per_gpu_s": 0}]}, ["money"]),
        ({"quotas": quotas("5 usd/day"), "prices": [{"model": "big"}]}, ["money"]),
        ({"quotas": quotas("5 usd/day"), "models": [{"enabled": False}]}, ["money"]),
        ({"quotas": quotas("5/day", tier="5 usd/day"), "prices": []}, ["money"]),
        ({"keys": [{"quotas": ["5/day", "5 usd/day"]}], "prices": []}, ["money"]),
        ({"keys": [{"quotas": ["5 usd/day"]}]}, []),
        ({"quotas": quotas("5/day", "6/day")}, ["larger quota"]),
        ({"quotas": quotas("5/day", "5 per day")}, ["larger quota"]),
        ({"quotas": quotas("5/day", "6/month", "7 tokens/day")}, []),
        ({"quotas": quotas("5/day", tier="5/day")}, ["larger quota"]),
        ({"quotas": quotas("5/day", tier="6/day")}, []),
    ],
)
def test_each_kind(rows: dict[str, Any], found: list[str]) -> None:
    """A row that another row makes ineffective is found; the same row with effect is not."""
    assert kinds(catalog(**rows)) == found


def test_what_depends_on_the_settings() -> None:
    """Callback hosts and alerts without the deployment's secret; private callback hosts; alerts to other hosts than those of callbacks; a default model that is none of the enabled ones of the pool."""
    hosts = catalog(
        customers=[{"callback_hosts": "hooks.example"}, {"callback_hosts": ""}, {"alert_url": "https://hooks.example"}]
    )
    two = catalog(models=[{}, {"name": "big"}])
    elsewhere = deployment_of(Settings(callback_secret=SECRET, callback_hosts="hooks.example"))

    own = [{"callback_hosts": "other.example", "alert_url": "https://hooks.example/"}]
    assert kinds(catalog(customers=own), elsewhere) == ["alerts"]
    assert kinds(hosts, elsewhere) == []
    private = catalog(
        customers=[{"callback_hosts": "127.0.0.1:9000, [fd00::1], 9.9.9.9"}, {"callback_hosts": "localhost"}]
    )
    assert kinds(private, elsewhere) == ["callbacks", "callbacks"]
    assert "127.0.0.1:9000, [fd00::1]:" in rows_without_effect(private, elsewhere)[0].said
    assert kinds(private, deployment_of(Settings(callback_secret=SECRET, callback_private_addresses=True))) == []
    assert kinds(hosts, elsewhere._replace(alert_problem=deployment_of(Settings()).alert_problem)) == ["alerts"]
    assert kinds(hosts, GATEWAYS._replace(can_sign=False)) == ["callbacks", "alerts"]
    assert kinds(two, GATEWAYS._replace(default_model="big")) == []
    assert "TIERLANE_DEFAULT_MODEL is huge" in rows_without_effect(two, GATEWAYS._replace(default_model="huge"))[0].said
    assert kinds(two, GATEWAYS._replace(pool="other")) == []


def test_notes_are_bounded() -> None:
    """Equal findings are one note, and of many rows the first few are shown."""
    many = catalog(keys=[{"id": f"{n:012}", "requests_per_second": 10.0, "burst": 20.0} for n in range(MOST_NOTES + 2)])
    notes = notes_of(rows_without_effect(many, GATEWAYS))

    assert len(notes_of(rows_without_effect(catalog(models=[{}, {"name": "big"}]), GATEWAYS))) == 1
    assert len(notes) == MOST_NOTES + 1
    assert notes[-1] == "2 more such rows: `tierlane check` has them."
