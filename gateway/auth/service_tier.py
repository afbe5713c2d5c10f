"""`service_tier` in a body (OpenAI's field): it can lower the tier of a request, and cannot raise it.

`flex` selects the last tier. `auto` and `default` select the tier of the key. Values that ask for a higher tier are
accepted if the key is in the first tier, and rejected otherwise.
"""

from msgspec.structs import asdict

from gateway.http.validation import invalid
from ledger.catalog.snapshot import Identity, Snapshot

OWN = frozenset({"auto", "default"})
FLEX = "flex"
MORE = frozenset({"priority", "scale", "fast"})
KNOWN = sorted({*OWN, FLEX, *MORE})


class LoweredIdentity(Identity, frozen=True, gc=False, kw_only=True):
    """An identity with its own limits, served in another tier."""

    own: Identity


def own(identity: Identity) -> Identity:
    """The identity in the key's own tier, whose factor lowers its limits, whichever tier it is served in.

    The customer has one bucket. Lowered by the factor of the last tier, it would have nothing left for its own tier.
    """
    return identity.own if isinstance(identity, LoweredIdentity) else identity


def served_as(identity: Identity, wanted: str | None, snapshot: Snapshot | None) -> Identity:
    """The identity in the tier that `wanted` selects. Raises RequestError that names `service_tier`."""
    if wanted is None or wanted in OWN or snapshot is None:
        return identity
    tiers = sorted(snapshot.tiers, key=lambda tier: tier.priority)
    if wanted == FLEX:
        last = tiers[-1]
        if last.name == identity.tier:
            return identity
        lowered = {"tier": last.name, "priority": last.priority, "own": identity}
        return LoweredIdentity(**asdict(identity) | lowered)
    if wanted in MORE:
        if tiers[0].name == identity.tier:
            return identity
        raise invalid("service_tier", f"`service_tier` cannot be {wanted!r}: a key's tier can be lowered, not raised.")
    raise invalid("service_tier", f"`service_tier` must be one of {', '.join(KNOWN)}.")


def response_tier(wanted: str | None) -> str:
    """The `service_tier` of a response."""
    return FLEX if wanted == FLEX else "default"
