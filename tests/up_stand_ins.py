"""Stand-ins for the roles, and `up` with them, so that supervision is tested without the roles.

`python up_stand_ins.py up DATA_DIR PORT [flag=value ...]` runs the real `up` with the real servers and stand-in roles;
`python up_stand_ins.py <role>` is such a role.
"""

# ruff: noqa: PLC0415 - a role imports what it needs only, and speaks by printing

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS customers (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), name text UNIQUE NOT NULL, tier text NOT NULL
);
CREATE TABLE IF NOT EXISTS api_keys (id text PRIMARY KEY, customer_id uuid NOT NULL, name text, revoked_at timestamptz);
CREATE TABLE IF NOT EXISTS models (
    name text PRIMARY KEY, pool text, max_batch_size int, max_wait_ms int, rps_per_gpu float8,
    target_utilization float8, enabled bool
);
CREATE TABLE IF NOT EXISTS cells (name text PRIMARY KEY, redis_url text, state text NOT NULL DEFAULT 'open');
CREATE OR REPLACE FUNCTION issue_api_key(customer text, name text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE key_id text := substr(md5(random()::text), 1, 12);
BEGIN
    INSERT INTO api_keys SELECT key_id, c.id, issue_api_key.name FROM customers AS c WHERE c.name = customer;
    RETURN 'tl_' || key_id || '_secret';
END $$;
"""


def migrate() -> None:
    """Create the tables that the demo data needs."""
    import asyncpg

    async def apply() -> None:
        connection = await asyncpg.connect(os.environ["TIERLANE_DATABASE_URL"].replace("+asyncpg", "", 1))
        await connection.execute(SCHEMA)
        await connection.close()

    asyncio.run(apply())


class Answers(BaseHTTPRequestHandler):
    """Ready, and healthy with the token; never ready if the scheduler does not start, nor while the file STAND_IN_UNREADY exists."""

    def do_GET(self) -> None:
        """Serve /readyz, /internal/dashboard/events, and /internal/autoscale with the content of the file STAND_IN_ADVICE."""
        authorized = self.headers.get("Authorization") == f"Bearer {os.environ['TIERLANE_SERVICE_TOKEN']}"
        allowed = self.path == "/readyz" or authorized
        unready = os.environ.get("STAND_IN_REFUSES") or Path(os.environ.get("STAND_IN_UNREADY", "")).is_file()
        self.send_response(503 if unready else 200 if allowed else 401)
        self.end_headers()
        advice = Path(os.environ.get("STAND_IN_ADVICE", os.devnull))
        scale = self.path == "/internal/autoscale" and authorized
        if scale:
            print("was asked for advice", flush=True)
        state = {"gateway": os.environ["TIERLANE_PROCESS_NAME"], "status": "healthy", "healthy_gpus": 1, "pools": []}
        self.wfile.write(advice.read_bytes() if scale else json.dumps(state).encode())

    def log_message(self, *args: object) -> None:
        """No log line for a request."""


class SharedPort(ThreadingHTTPServer):
    """A server whose port can be shared, as that of gateways."""

    allow_reuse_port = True
    daemon_threads = True


def gateway() -> None:
    """Serve until stopped; with STAND_IN_STUBBORN SIGTERM is ignored."""
    obey_or_not()
    server = SharedPort((os.environ["TIERLANE_HOST"], int(os.environ["TIERLANE_PORT"])), Answers)
    print("gateway listens", flush=True)
    server.serve_forever()


def worker() -> None:
    """Run with a child process in place of the model process."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    wait()


def obey_or_not() -> None:
    """Ignore SIGTERM with STAND_IN_STUBBORN."""
    if os.environ.get("STAND_IN_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def wait() -> None:
    """Do nothing until killed."""
    obey_or_not()
    print("started", flush=True)
    while True:
        time.sleep(1000)


def refuse() -> None:
    """Exit like a role with an invalid setting."""
    print("TIERLANE_LEASE_MS: must be larger", file=sys.stderr)
    sys.exit(2)


def up(data_dir: str, port: str, *flags: str) -> None:
    """Run `up` with stand-in roles."""
    from tierlane.settings.model import load_settings
    from tierlane_local.up.run import run

    given: dict[str, object] = {flag.split("=")[0]: flag.split("=")[1] for flag in flags}
    settings = load_settings({"data_dir": data_dir, "port": port, "backend": "simulated", **given})
    sys.exit(run(settings, command=lambda role: [sys.executable, str(Path(__file__)), role]))


if __name__ == "__main__":
    scheduler = refuse if os.environ.get("STAND_IN_REFUSES") else wait
    roles: dict[str, Callable[..., None]] = {
        "migrate": migrate,
        "gateway": gateway,
        "worker": worker,
        "scheduler": scheduler,
        "up": up,
    }
    roles[sys.argv[1]](*sys.argv[2:])
