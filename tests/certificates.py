"""Certificates for tests; the module is that of `tierlane chaos`, which makes its own in the same way."""

from tierlane_tools.chaos.stack.certificates import Certificates, certificates

__all__ = ["Certificates", "certificates"]
