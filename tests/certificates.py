"""Certificates for tests; the module is that of `tierlane chaos`, which makes its own in the same way."""

from tierlane.chaos.certificates import Certificates, certificates

__all__ = ["Certificates", "certificates"]
