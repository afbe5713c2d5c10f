"""`service_tier` in a body, OpenAI's word for how much a client cares: it may lower the key's tier, and nothing raises it.

`flex` takes the last tier there is. `auto` and `default` are the key's own. The words that ask for more are obeyed where
there is nothing more to be had, and refused by name where there is.
"""

from gateway.catalog import IdentityView, SnapshotView, TierRow
from gateway.http.request import invalid

OWN = frozenset({"auto", "default"})
FLEX = "flex"
MORE = frozenset({"priority", "scale", "fast"})
KNOWN = sorted({*OWN, FLEX, *MORE})


class LoweredIdentity:
    """An identity with all its limits, served in another tier."""

    __slots__ = ("own", "priority", "tier")

    def __init__(self, own: IdentityView, tier: TierRow) -> None:
        self.own = own
        self.tier = tier.name
        self.priority = tier.priority

    def __getattr__(self, name: str) -> object:
        return getattr(self.own, name)


def own(identity: IdentityView) -> IdentityView:
    """The identity in the key's own tier, whose capacity lowers its limits, whichever tier it is served in.

    The customer has one bucket: lowered as far as the last tier's, it would have nothing left for its own tier either.
    """
    return identity.own if isinstance(identity, LoweredIdentity) else identity


def served_as(identity: IdentityView, wanted: str | None, snapshot: SnapshotView | None) -> IdentityView:
    """Who is served. Raises RequestError that names `service_tier`."""
    if wanted is None or wanted in OWN or snapshot is None:
        return identity
    tiers = sorted(snapshot.tiers, key=lambda tier: tier.priority)
    if wanted == FLEX:
        last = tiers[-1]
        return identity if last.name == identity.tier else LoweredIdentity(identity, last)  # type: ignore[return-value]  # delegates
    if wanted in MORE:
        if tiers[0].name == identity.tier:
            return identity
        raise invalid("service_tier", f"`service_tier` cannot be {wanted!r}: a key's tier can be lowered, not raised.")
    raise invalid("service_tier", f"`service_tier` must be one of {', '.join(KNOWN)}.")


def told(wanted: str | None) -> str:
    """What an answer says of it, in OpenAI's words."""
    return FLEX if wanted == FLEX else "default"
