"""Rows without effect, as the verbs that write them and `tierlane check` report them."""

import json
from typing import Any

import pytest

from integration.admin_fixtures import Admin, customer
from integration.ledger_fixtures import database_url, db, postgres_server

__all__ = ["database_url", "db", "postgres_server"]

Connection = Any
SECRET = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"


@pytest.fixture
async def admin(database_url: str, db: Connection) -> Admin:
    await customer(db)
    return Admin(database_url)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["quota", "set", "acme", "5 usd/day"],
            "Quota 5 usd/day of acme counts nothing: no enabled model has a price.",
        ),
        (["quota", "set", "--tier", "paid", "5 usd/day"], "Quota 5 usd/day of tier paid counts nothing"),
        (["model", "create", "big"], "Requests without `model` are rejected: pool default has 2 enabled models"),
        (["tier", "set", "enterprise", "--slo-ms", "800"], "slo_ms 800 of tier enterprise rejects nothing"),
        (
            ["tier", "set", "paid", "--shed-depth", "10,001"],
            "shed_depth 10,001 of tier paid is above its max_queue_depth",
        ),
        (
            ["customer", "set", "acme", "--callback-hosts", "a.example"],
            "TIERLANE_CALLBACK_SECRET is not set in this shell",
        ),
        (
            ["key", "create", "acme", "ci", "--requests-per-second", "5000"],
            "is not below that of acme, 1,000 (burst 1,000)",
        ),
    ],
)
async def test_the_verb_that_writes_the_row_adds_a_note(admin: Admin, arguments: list[str], note: str) -> None:
    """Also a dry run, as what would hold; a verb that writes another row does not."""
    await admin.done("model", "create", "tiny")
    dry = await admin.done(*arguments, "--dry-run")
    document = await admin.json(*arguments)

    assert [line for line in dry.splitlines() if line.startswith("If applied: ") and note in line]
    assert [each for each in document["notes"] if note in each] == document["notes"]
    assert note not in await admin.done("tier", "set", "free", "--burst", "300")


async def test_a_row_with_effect_has_no_note(admin: Admin) -> None:
    """A price, a secret, and a limit below the customer's."""
    await admin.done("model", "create", "tiny")
    await admin.done("price", "set", "tiny", "--usd-per-gpu-s", "1")
    secret = {"TIERLANE_CALLBACK_SECRET": SECRET}

    for words in (
        ("quota", "set", "acme", "5 usd/day"),
        ("customer", "set", "acme", "--callback-hosts", "a.example"),
        ("key", "create", "acme", "ci", "--requests-per-second", "5"),
    ):
        assert json.loads(await admin.done(*words, "-o", "json", env=secret))["notes"] == [], words
    (note,) = (await admin.json("price", "set", "tiny", "--usd-per-gpu-s", "0"))["notes"]
    assert note.startswith("Quota 5 usd/day of acme counts nothing: ")


async def test_check_has_one_line_for_each_kind(admin: Admin) -> None:
    """With the first such row, the number of others, and what to do."""
    await admin.done("quota", "set", "acme", "5 usd/day")
    await admin.done("quota", "set", "acme", "50 usd/month")
    await admin.done("tier", "set", "enterprise", "--slo-ms", "800")
    result = await admin.run("check", "-o", "json")
    found = [c for c in json.loads(result.stdout)["checks"] if c["group"] == "rows without effect"]

    assert [(each["name"], each["level"]) for each in found] == [("objective", "warn"), ("money", "warn")]
    assert found[1]["said"] == (
        "Quota 5 usd/day of acme counts nothing: no enabled model has a price. 1 more of this kind."
    )
    assert found[1]["advice"] == "Set one: `tierlane price set MODEL --usd-per-gpu-s 0.002`."


async def test_only_what_a_verb_changed_has_a_note(admin: Admin) -> None:
    """With all reasons and a command that can be pasted; a verb or a file that changes another column of the row has none."""
    await admin.done("model", "create", "tiny")
    url = ("customer", "set", "acme", "--callback-hosts", "a.example", "--alert-url", "https://10.0.0.1/x")
    notes = (await admin.json(*url))["notes"]

    assert [each.partition(":")[0] for each in notes] == ["TIERLANE_CALLBACK_SECRET is not set in this shell"] * 2
    for reason in ("others do not. By the settings", "whsec_...", "is not one of those", "is not public."):
        assert reason in notes[1]
    (note,) = (await admin.json("quota", "set", "acme", "5 usd/day"))["notes"]
    assert note.endswith("Set one: `tierlane price set tiny --usd-per-gpu-s 0.002`.")
    for words in (
        ("customer", "set", "acme", "--weight", "2"),
        ("model", "set", "tiny", "--max-batch-size", "8"),
        ("quota", "set", "acme", "5 usd/day", "--alert-shares", "1"),
    ):
        assert (await admin.json(*words))["notes"] == [], words
    exported = await admin.done("export")
    changed = exported.replace("weight: 2", "weight: 3")
    assert changed != exported
    assert "TIERLANE_CALLBACK_SECRET" not in await admin.done("apply", "-f", "-", input=changed)


async def test_another_tier_shows_the_limits_before_and_after(admin: Admin) -> None:
    """Those that the customer inherits, and the quotas of the tiers; a limit of its own stays."""
    await admin.done("customer", "set", "acme", "--burst", "77")
    await admin.done("quota", "set", "--tier", "free", "9/day")
    shown = await admin.done("customer", "set", "acme", "--tier", "free", "--dry-run")
    (note,) = [line for line in shown.splitlines() if line.startswith("If applied: Limits in force: ")]
    assert "webhook" not in await admin.done("customer", "create", "new", "--tier", "free")
    inherited = (await admin.json("customer", "set", "acme", "--burst", "none"))["notes"]

    assert "requests_per_second 1,000 -> 200" in note
    assert "quotas of the tier none -> 9/day" in note
    assert "burst" not in note
    assert inherited == ["Limits in force: burst 77 -> 1,000."]
