"""The columns of the catalog's tables that an administrator can set in a row."""

from typing import Any

from sqlalchemy import Column, Table

from ledger.catalog.webhook_secret import WebhookSecrets

NOT_SET = {
    "tiers": {"name"},
    "customers": {"id", "name", "status", "created_at", *WebhookSecrets._fields},
    "api_keys": {
        "id",
        "customer_id",
        "name",
        "secret_hash",
        "created_at",
        "expires_at",
        "revoked_at",
        "last_used_at",
        "quota_key",
    },
    "quotas": {"id", "customer_id", "tier", "quota"},
    "models": {"name", "gpu_timeout_ms"},
    "prices": {"model", "valid_from"},
    "cells": {"name", "state"},
}
"""Columns that are arguments, changed by a verb of their own, or not used."""


def settable(table: Table) -> list[Column[Any]]:
    """The columns that are options of the command line and fields of the admin API."""
    return [column for column in table.c if column.name not in NOT_SET[table.name]]
