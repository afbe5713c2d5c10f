"""Who is served, and in which tier, where a body names a `service_tier`."""

from gateway.auth.service_tier import own, served_as
from identities import identity
from ledger.catalog.snapshot import Snapshot, Tier

FIRST = Tier("enterprise", 1, 0.6, (500.0, 1000.0, 200, None), 1000, 2000, None, None)
LAST = Tier("free", 7, 0.1, (5.0, 10.0, 5, None), 100, 500, None, None)
CATALOG = Snapshot(1, (FIRST, LAST), {}, {}, {}, ())


def test_flex_is_served_with_the_last_tiers_name_and_priority() -> None:
    """So that a server which orders by priority puts it where it belongs; the limits stay the own tier's."""
    who = identity(tier="enterprise", priority=1, burst=40.0)

    lowered = served_as(who, "flex", CATALOG)

    assert (lowered.tier, lowered.priority, lowered.limits) == ("free", 7, who.limits)
    assert own(lowered) is who


def test_who_does_not_ask_to_be_lowered_stays() -> None:
    """Nothing said, the default's names, and flex in the last tier."""
    who, last = identity(tier="enterprise", priority=1), identity(tier="free", priority=7)

    assert all(served_as(who, wanted, CATALOG) is who for wanted in (None, "auto", "default"))
    assert served_as(last, "flex", CATALOG) is last
