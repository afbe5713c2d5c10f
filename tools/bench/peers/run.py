"""The same job on Tierlane and on other serving systems, one after the other, in one table.

    python tools/bench/peers/run.py --install-only                # virtual environments, once
    python tools/bench/peers/run.py --seconds 10 --json out.json

A system that cannot be installed, does not start or returns wrong responses has a row with the reason. Exit codes: 0
every system has figures, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import datetime as dt
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import wrk
from catalogue import PEERS, InstallError, Peer, pinned, prepare
from descendants import adopt_orphans
from measuring import JobError, Plan, measure
from rich.console import Console
from running import Job, StartError, running
from table import Row, document, markdown, screen
from tierlane_stack import GATEWAYS, audit_rows, running_tierlane

TIERLANE = "tierlane"
NAMES = (TIERLANE, *(peer.name for peer in PEERS))
CONSOLE = Console(stderr=True)
SLACK_S = 240  # For start, checks and the audit of one system.
WIDTH = 160  # Of the table where there is no terminal.
FAULTS = (InstallError, StartError, JobError, wrk.WrkError)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=10, help="of load on each system")
    parser.add_argument("--idle-seconds", type=int, default=3, help="with one connection")
    parser.add_argument("--warm-seconds", type=int, default=3, help="of load that is not counted")
    parser.add_argument("--attempts", type=int, default=3, help="loads at most, until no other process disturbs")
    parser.add_argument("--connections", type=int, default=1000, help="at most 512 for some peers")
    parser.add_argument("--window-ms", type=int, default=40, help="window of the batches of peers")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="systems, in this order")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), help="folder of virtual environments")
    parser.add_argument("--port", type=int, default=18600, help="the first of fifteen that must be free")
    parser.add_argument("--install-only", action="store_true", help="make the virtual environments, measure nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


def tierlane_row(arguments: argparse.Namespace, job: Job) -> Row:
    """Measure Tierlane, and count its audit rows."""
    title = f"Tierlane, {job.gpus} workers, {GATEWAYS} gateways"
    row = Row(TIERLANE, title, arguments.connections)
    with running_tierlane(arguments.port, job) as (stack, target):
        measured = measure(target, _plan(arguments, row.connections))
        rows = audit_rows(stack)
    # Requests that are open when wrk stops, and those of the checks, have rows too; lost rows would show as fewer.
    if rows < measured.answered_in_all:
        return row._replace(failed=f"{rows} audit rows for {measured.answered_in_all} answers")
    return row._replace(measured=measured, audit="yes")


def peer_row(peer: Peer, python: Path, arguments: argparse.Namespace, job: Job) -> Row:
    """Measure one peer."""
    row = _named(peer, arguments)
    job = job if peer.window_ms is None else job._replace(window_ms=peer.window_ms)
    with running(peer, python, arguments.port, job) as target:
        return row._replace(measured=measure(target, _plan(arguments, row.connections)))


def _named(peer: Peer, arguments: argparse.Namespace) -> Row:
    version = pinned(peer.requirements, peer.package)
    connections = min(arguments.connections, peer.most_connections or arguments.connections)
    return Row(peer.name, f"{peer.title} {version}, {peer.setup}", connections)


def _plan(arguments: argparse.Namespace, connections: int) -> Plan:
    return Plan(connections, arguments.seconds, arguments.idle_seconds, arguments.warm_seconds, arguments.attempts)


def install(arguments: argparse.Namespace) -> dict[str, Path | InstallError]:
    """The Python of each selected peer, or the reason why there is none."""
    made: dict[str, Path | InstallError] = {}
    for peer in PEERS:
        if peer.name in arguments.only:
            try:
                with CONSOLE.status(f"{peer.title}: virtual environment"):
                    made[peer.name] = prepare(arguments.venvs / peer.system, peer.requirements)
            except InstallError as error:
                made[peer.name] = error
                CONSOLE.print(f"{peer.title}: {error}")
    return made


def compare(arguments: argparse.Namespace, pythons: dict[str, Path | InstallError]) -> Iterator[Row]:
    """Measure the selected systems in order; yields their rows."""
    seconds = arguments.seconds * arguments.attempts + arguments.idle_seconds + arguments.warm_seconds
    job = Job(arguments.window_ms, limit_s=seconds + SLACK_S)
    peers = {peer.name: peer for peer in PEERS}
    for name in arguments.only:
        CONSOLE.print(f"{dt.datetime.now(dt.UTC):%H:%M:%S} {name} ...")
        if name == TIERLANE:
            empty = Row(TIERLANE, "Tierlane", arguments.connections)
            yield _row_or_error(empty, lambda: tierlane_row(arguments, job))
        elif isinstance(python := pythons[name], InstallError):
            yield _named(peers[name], arguments)._replace(failed=str(python))
        else:
            yield _measured_peer(peers[name], python, arguments, job)


def _measured_peer(peer: Peer, python: Path, arguments: argparse.Namespace, job: Job) -> Row:
    return _row_or_error(_named(peer, arguments), lambda: peer_row(peer, python, arguments, job))


def _row_or_error(empty: Row, work: Callable[[], Row]) -> Row:
    try:
        return work()
    except FAULTS as error:
        CONSOLE.print(f"{empty.title}: {error}")
        return empty._replace(failed=str(error))


def warn(rows: list[Row]) -> None:
    """Print which figures were disturbed by other processes."""
    for row in rows:
        if row.measured and not row.measured.counted.quiet:
            cores = row.measured.counted.others_cores
            CONSOLE.print(f"{row.title}: other processes used {cores:.2f} cores.")


def write(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Print the table, and write the requested files."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(screen(rows))
    about = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "seconds": arguments.seconds,
        "window_ms": arguments.window_ms,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document(rows, about), indent=2) + "\n", "utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows) + "\n", "utf-8")


def main() -> int:
    """Run the comparison; return the exit code."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that all processes are stopped.
    if not arguments.install_only and not wrk.installed():
        raise SystemExit(wrk.HINT)
    adopt_orphans()
    pythons = install(arguments)
    if arguments.install_only:
        return int(any(isinstance(python, InstallError) for python in pythons.values()))
    rows: list[Row] = []
    try:
        for row in compare(arguments, pythons):
            rows.append(row)  # noqa: PERF402 - measured rows are kept when the rest is interrupted
    finally:
        reached = {row.name for row in rows}
        rows += [Row(name, name, 0, failed="interrupted") for name in arguments.only if name not in reached]
        write(rows, arguments)
        warn(rows)
    return int(any(row.measured is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
