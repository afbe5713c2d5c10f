"""The same job on Tierlane and on what one would pick instead, one after the other in one run, in one table.

    python bench/peers/run.py --install-only                # virtual environments, once
    python bench/peers/run.py --seconds 10 --json out.json

A system that cannot be installed, does not start or does not do the job has a row that says so. Exit codes: 0 every
system has figures, 1 not so.
"""
# ruff: noqa: INP001 - a folder of scripts, not a package

import argparse
import asyncio
import datetime as dt
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # A checkout need not be installed to be measured.

import wrk
from answers import JobError
from catalogue import PEERS, Peer
from descendants import adopt_orphans
from environments import InstallError, pinned, prepare
from measuring import Plan, measure
from rich.console import Console
from running import Job, StartError, running
from table import Row, document, markdown, screen
from tierlane_stack import GATEWAYS, running_tierlane

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
    parser.add_argument("--attempts", type=int, default=3, help="loads at most, until nothing else disturbs")
    parser.add_argument("--connections", type=int, default=1000, help="some peers are asked with 512 at most")
    parser.add_argument("--window-ms", type=int, default=40, help="how long a peer's batch waits for company")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="systems, in this order")
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), help="folder of virtual environments")
    parser.add_argument("--port", type=int, default=18600, help="the first of fifteen that must be free")
    parser.add_argument("--install-only", action="store_true", help="make the virtual environments, measure nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    return parser.parse_args()


def tierlane_row(arguments: argparse.Namespace, job: Job) -> Row:
    """Tierlane, with its audit counted."""
    says = f"Tierlane, {job.gpus} workers, {GATEWAYS} gateways"
    row = Row(TIERLANE, says, arguments.connections)
    with running_tierlane(arguments.port, job) as stack:
        measured = measure(stack.target, _plan(arguments, row.connections))
        rows = asyncio.run(stack.audit_rows())
    # wrk forgets what is under way when it ends, and readiness is asked for; a lost row would show as fewer.
    if rows < measured.answered_in_all:
        return row._replace(failed=f"{rows} audit rows for {measured.answered_in_all} answers")
    return row._replace(measured=measured, audit="yes")


def peer_row(peer: Peer, python: Path, arguments: argparse.Namespace, job: Job) -> Row:
    """One peer."""
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
    """The Python of each wanted peer, or why there is none."""
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
    """The rows, one after the other, in the order that was asked for."""
    seconds = arguments.seconds * arguments.attempts + arguments.idle_seconds + arguments.warm_seconds
    job = Job(arguments.window_ms, limit_s=seconds + SLACK_S)
    peers = {peer.name: peer for peer in PEERS}
    for name in arguments.only:
        CONSOLE.print(f"{dt.datetime.now(dt.UTC):%H:%M:%S} {name} ...")
        if name == TIERLANE:
            empty = Row(TIERLANE, "Tierlane", arguments.connections)
            yield _or_why(empty, lambda: tierlane_row(arguments, job))
        elif isinstance(python := pythons[name], InstallError):
            yield _named(peers[name], arguments)._replace(failed=str(python))
        else:
            yield _measured_peer(peers[name], python, arguments, job)


def _measured_peer(peer: Peer, python: Path, arguments: argparse.Namespace, job: Job) -> Row:
    return _or_why(_named(peer, arguments), lambda: peer_row(peer, python, arguments, job))


def _or_why(empty: Row, work: Callable[[], Row]) -> Row:
    try:
        return work()
    except FAULTS as error:
        CONSOLE.print(f"{empty.says}: {error}")
        return empty._replace(failed=str(error))


def warn(rows: list[Row]) -> None:
    """Say which figures were disturbed."""
    for row in rows:
        if row.measured and not row.measured.counted.quiet:
            cores = row.measured.counted.others_cores
            CONSOLE.print(f"{row.says}: something else used {cores:.2f} cores meanwhile.")


def write(rows: list[Row], arguments: argparse.Namespace) -> None:
    """The screen, and the files that were asked for."""
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
    """Run it all."""
    arguments = read_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that everything is stopped on the way out.
    try:
        if not arguments.install_only:
            wrk.require()
    except wrk.WrkError as error:
        raise SystemExit(str(error)) from None
    adopt_orphans()
    pythons = install(arguments)
    if arguments.install_only:
        return int(any(isinstance(python, InstallError) for python in pythons.values()))
    rows: list[Row] = []
    try:
        for row in compare(arguments, pythons):
            rows.append(row)  # noqa: PERF402 - what is measured is shown, also when the rest is interrupted
    finally:
        reached = {row.name for row in rows}
        rows += [Row(name, name, 0, failed="interrupted") for name in arguments.only if name not in reached]
        write(rows, arguments)
        warn(rows)
    return int(any(row.measured is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
