"""The command `tierlane up`: its flags. The rest is imported when it runs."""

from typing import TYPE_CHECKING

from tierlane.command import add_settings_verb, run_group, single_verb

if TYPE_CHECKING:
    from tierlane.settings.model import Settings

FLAGS = (
    "port", "grpc_port", "admin_port", "gateways", "schedulers", "workers", "autoscale", "backend", "pools", "max_batch_size", "cluster", "cells", "data_dir", "ephemeral", "replace",
    "log_format", "log_level",
)  # fmt: skip

app = single_verb()


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "up", argv)


def up(settings: "Settings") -> int:
    """Start everything on this machine; Ctrl-C stops it."""
    from tierlane_local.up.run import run  # noqa: PLC0415 - see above

    return run(settings)


add_settings_verb(app, up, example="up\nup --port 9000 --workers 4 --ephemeral", flags=FLAGS)
