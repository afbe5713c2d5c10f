"""Counters, their sums over the gateways of a host, and `GET /metrics`."""
