"""What all gateways tell together: how full batches are, and which customers ask most. Pure."""

from collections.abc import Sequence

from scheduler.protocol.pool_view import GatewayStats

SHOWN = 5


def batch_fill(gateways: Sequence[GatewayStats]) -> float | None:
    """How full the batches of the last two seconds were, 0..1; None where there was none."""
    batches = sum(each.batches_per_second for each in gateways)
    return round(min(1.0, sum(each.filled_per_second for each in gateways) / batches), 4) if batches else None


def busiest(gateways: Sequence[GatewayStats]) -> list[tuple[str, str, float]]:
    """(name, tier, requests/s) of those that ask most, the busiest first."""
    rates: dict[tuple[str, str], float] = {}
    for each in gateways:
        for customer in each.busiest:
            key = (customer.name, customer.tier)
            rates[key] = rates.get(key, 0.0) + customer.rps
    ordered = sorted(rates.items(), key=lambda rate: (-rate[1], rate[0]))
    return [(name, tier, round(rps, 1)) for (name, tier), rps in ordered[:SHOWN]]
