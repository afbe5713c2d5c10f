"""The formats of traces: how each is recognised by its first line, and how its requests are read one by one.

docs/traces.md names the versions and sources. Columns are found by their names, because releases of one trace have them at
different places. A line that cannot be read ends the reading with its number; only requests without an answer are marked, since
published files have them on purpose.
"""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from scheduler.token_estimates import estimate
from tierlane_tools.traces.request import TraceError, TraceRequest

AUTO = "auto"
MOST_HEAD = 1 << 16
"""Characters of a file by which its format is recognised."""

Read = Callable[[Path, TextIO], Iterator[TraceRequest]]


class TraceFormat(NamedTuple):
    """A format. `columns`: those that its CSV must have, or `fields` of its JSON; `read` begins at the start of the file."""

    columns: frozenset[str]
    fields: tuple[str, ...]
    read: Read


class _Row:
    """A row of a CSV file by the names of its columns; faults name the line."""

    __slots__ = ("_at", "_cells", "_line", "_path")

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self._path = path
        self._at = {name.strip(): number for number, name in enumerate(header)}
        self._cells: Sequence[str] = ()
        self._line = 0

    def set(self, line: int, cells: Sequence[str]) -> None:
        """Take the next row."""
        self._line, self._cells = line, cells
        if len(cells) < len(self._at):
            raise fault(self._path, line, f"has {len(cells)} of {len(self._at)} columns")

    def text(self, name: str) -> str:
        """The text of a column; empty if the file does not have the column."""
        at = self._at.get(name)
        return "" if at is None else self._cells[at]

    def number(self, name: str) -> float:
        """A finite number. Raises TraceError."""
        return number(self._path, self._line, name, self.text(name))

    def tokens(self, name: str) -> int:
        """A number of tokens. Raises TraceError."""
        text = self._cells[self._at[name]]
        # Nearly all: a third of the time.
        return int(text) if text.isascii() and text.isdigit() else tokens(self._path, self._line, name, text)

    def time(self, name: str) -> datetime:
        """A date and time, without an offset in UTC; digits beyond microseconds are left out. Raises TraceError."""
        text = self.text(name)
        try:
            read = datetime.fromisoformat(text)
        except ValueError:
            raise fault(self._path, self._line, f"needs a date and time in {name}, got {text!r}") from None
        return read if read.tzinfo else read.replace(tzinfo=UTC)


def fault(path: Path, line: int, reason: str) -> TraceError:
    """The error for a line."""
    return TraceError(f"--trace: line {line} of {path} {reason}.")


def number(path: Path, line: int, name: str, value: object) -> float:
    """A finite number from a text or a JSON value. Raises TraceError."""
    try:
        read = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        read = math.nan
    if not math.isfinite(read):
        raise fault(path, line, f"needs a number in {name}, got {value!r}")
    return read


def tokens(path: Path, line: int, name: str, value: object) -> int:
    """A number of tokens, 0 or more. Raises TraceError."""
    read = number(path, line, name, value)
    if read < 0 or read != int(read):
        raise fault(path, line, f"needs a number of tokens in {name}, got {value!r}")
    return int(read)


def _rows(path: Path, file: TextIO) -> Iterator[_Row]:
    """The rows of a CSV file. The object is the same for all of them."""
    reader = csv.reader(file)
    row = _Row(path, next(reader))
    try:
        for cells in reader:
            if cells:
                row.set(reader.line_num, cells)
                yield row
    except csv.Error as error:
        raise fault(path, reader.line_num, f"cannot be read as CSV ({error})") from None


def _burstgpt(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    for row in _rows(path, file):
        output = row.tokens("Response tokens")
        yield TraceRequest(
            row.number("Timestamp"),
            row.tokens("Request tokens"),
            output,
            session=row.text("Session ID"),
            model=row.text("Model"),
            kind=row.text("Log Type"),
            failed=not output,
        )


def _azure(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for row in _rows(path, file):
        time, output = row.time("TIMESTAMP"), row.tokens("GeneratedTokens")
        first = first or time
        yield TraceRequest((time - first).total_seconds(), row.tokens("ContextTokens"), output, failed=not output)


def _audit(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    first: datetime | None = None
    for row in _rows(path, file):
        time = row.time("created_at")
        first = first or time
        read = estimate(row.tokens("input_bytes")) if row.text("input_bytes") else 0
        used = row.tokens("tokens_used") if row.text("tokens_used") else 0
        yield TraceRequest(
            (time - first).total_seconds(),
            read,
            max(1, used - read) if used else 0,
            customer=row.text("customer_id"),
            tier=row.text("tier"),
            model=row.text("model"),
            failed=not used,
        )


def _arrivals(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    for row in _rows(path, file):
        output = round(row.number("words"))
        yield TraceRequest(row.number("at_s"), 1, max(0, output), customer=row.text("customer"), failed=output <= 0)


class _MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace; other programs write more fields, and times with a fraction."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    session_id: str | int = ""


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for at, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            read = decode(line)
        except msgspec.MsgspecError as error:
            raise fault(path, at, f"cannot be read: {error}") from None
        if read.input_length < 0 or read.output_length < 0:
            raise fault(path, at, "has a length below 0")
        yield TraceRequest(
            number(path, at, "timestamp", read.timestamp) / 1000,
            read.input_length,
            read.output_length,
            session=str(read.session_id),
            blocks=tuple(read.hash_ids),
            failed=not read.output_length,
        )


class _VllmResult(msgspec.Struct):
    """What a result has of each request; only with `--save-detailed`."""

    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None
    queue_times: list[float] | None = None
    errors: list[str] | None = None


def _vllm(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    try:
        result = msgspec.json.decode(file.read(), type=_VllmResult)
    except msgspec.MsgspecError as error:
        raise TraceError(
            f"--trace: {path} cannot be read as one result of vllm bench serve ({error}); --append-result writes several."
        ) from None
    inputs, outputs, starts = result.input_lens, result.output_lens, result.start_times
    if inputs is None or outputs is None or starts is None:
        raise TraceError(f"--trace: {path} has no start_times of single requests; write it with --save-detailed.")
    waits, errors = result.queue_times or [0.0] * len(starts), result.errors or [""] * len(starts)
    if {len(inputs), len(outputs), len(waits), len(errors)} != {len(starts)}:
        raise TraceError(f"--trace: {path} has lists of different lengths; it is no whole result.")
    for start, wait, read, written, reason in zip(starts, waits, inputs, outputs, errors, strict=True):
        # A request that waited for --max-concurrency arrived before it was sent.
        yield TraceRequest(start - wait, read, written, failed=bool(reason) or not written)


FORMATS = {
    "burstgpt": TraceFormat(
        frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"}), (), _burstgpt
    ),
    "azure": TraceFormat(frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), (), _azure),
    "audit": TraceFormat(frozenset({"created_at", "input_bytes", "tokens_used"}), (), _audit),
    "arrivals": TraceFormat(frozenset({"at_s", "customer", "words"}), (), _arrivals),
    "mooncake": TraceFormat(frozenset(), ('"timestamp"', '"input_length"'), _mooncake),
    "vllm": TraceFormat(frozenset(), ('"num_prompts"', '"request_rate"'), _vllm),
}


def read_requests(path: Path, name: str = AUTO) -> Iterator[TraceRequest]:
    """The requests of a file in its order. `name`: of the format, or `auto`. Raises TraceError, while it is read too."""
    try:
        # With the mark of Windows or without; lines end in either way.
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.read(MOST_HEAD)
            file.seek(0)
            yield from FORMATS[_recognised(path, head, name)].read(path, file)
    except OSError as error:
        raise TraceError(f"--trace: {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise TraceError(f"--trace: {path} is no text in UTF-8; uncompress it first if it is compressed.") from None


def _recognised(path: Path, head: str, name: str) -> str:
    if not head.strip():
        raise TraceError(f"--trace: {path} is empty.")
    first = head.split("\n", 1)[0].strip()
    columns = frozenset(column.strip() for column in next(csv.reader([first])))
    for each, known in FORMATS.items():
        is_it = known.columns <= columns if known.columns else all(field in head for field in known.fields)
        if is_it and (known.columns or head.lstrip().startswith("{")) and name in (AUTO, each):
            return each
    if name == AUTO:
        raise TraceError(
            f"--trace: the format of {path} is not known; it must be one of {', '.join(FORMATS)} (see docs/traces.md)."
        )
    wanted: Any = FORMATS[name].columns or FORMATS[name].fields
    raise TraceError(f"--trace-format: {path} is no {name}: its first line must have {', '.join(sorted(wanted))}.")
