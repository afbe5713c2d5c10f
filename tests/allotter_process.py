"""An allotter as a process of its own, for tests that kill and suspend it: python allotter_process.py NAME CONFIGURATION.

The configuration is a JSON file, {"cells": {name: URL}, "customers": [fields of a customer]}; it is read again when it changes.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratelimit.limits import REQUEST_BUCKET, Bucket
from scheduler.cells.allotter import Allotter
from scheduler.cells.division import SharedCustomer


def customer(fields: Mapping[str, Any]) -> SharedCustomer:
    """A customer of the configuration."""
    return SharedCustomer(
        fields["id"],
        tuple(fields["cells"]),
        (Bucket(REQUEST_BUCKET, fields["rate"], fields["burst"]),),
        fields["concurrency"],
        tuple((name, amount) for name, amount in fields["quotas"]),
        fields["shared"],
    )


class Configuration:
    """The file, as the catalog of an allotter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = ""
        self.cells: dict[str, str] = {}
        self.all: dict[str, SharedCustomer] = {}
        self.shared: dict[str, SharedCustomer] = {}

    def read(self) -> Mapping[str, SharedCustomer]:
        """The customers of several cells."""
        text = self._path.read_text("utf-8")
        if text != self._text:
            self._text, found = text, json.loads(text)
            self.cells = found["cells"]
            self.all = {fields["id"]: customer(fields) for fields in found["customers"]}
            self.shared = {name: each for name, each in self.all.items() if each.shared}
        return self.shared


def main(name: str, path: str) -> None:
    """Run until the process is killed."""
    configuration = Configuration(Path(path))
    configuration.read()
    allotter = Allotter(name, lambda: configuration.cells, configuration.read, configuration.all.get, life_s=1.5)
    asyncio.run(allotter.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
