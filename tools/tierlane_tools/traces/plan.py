"""The options of a trace, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierlane.command import OptionReader
from tierlane_tools.bench.plan.mix import Mix
from tierlane_tools.traces.formats import AUTO, FORMATS
from tierlane_tools.traces.options import BY, MOST_TOKENS

ONE_TIER = Mix(("free",), (1.0,))


@dataclass(frozen=True)
class TraceOptions:
    """The options, checked. Times in seconds of the file; `rate` of the replay, None: the trace's. `by`: field and tiers."""

    path: Path
    format: str = AUTO
    from_s: float = -math.inf
    to_s: float = math.inf
    speed: float = 1.0
    spread_s: float = 0.0
    rate: float | None = None
    by: tuple[str, Mapping[str, int]] | None = None
    max_input: int = MOST_TOKENS
    max_output: int = MOST_TOKENS
    mix: Mix = ONE_TIER
    seed: int = 1


def read_trace_options(reader: OptionReader, mix: Mix, seed: int) -> TraceOptions | None:
    """The options of a trace; None without one. Raises the reader's error."""
    path = reader.path("trace")
    if path is None:
        return None
    name = reader.text("trace_format")
    if name not in (AUTO, *FORMATS):
        raise reader.fault("trace_format", f"must be one of {', '.join((AUTO, *FORMATS))}, got {name!r}.")
    from_s = reader.number("trace_from") if reader.text("trace_from") else -math.inf
    to_s = reader.number("trace_to") if reader.text("trace_to") else math.inf
    if to_s <= from_s:
        raise reader.fault("trace_to", f"must be above --trace-from ({from_s:g}), got {to_s:g}.")
    by, mix = _by(reader, mix)
    return TraceOptions(
        path,
        name,
        from_s,
        to_s,
        reader.number("trace_speed", positive=True),
        reader.number("trace_spread"),
        reader.number("trace_rate", positive=True) if reader.text("trace_rate") else None,
        by,
        reader.integer("max_input_tokens") if reader.text("max_input_tokens") else MOST_TOKENS,
        reader.integer("max_output_tokens") if reader.text("max_output_tokens") else MOST_TOKENS,
        mix,
        seed,
    )


def _by(reader: OptionReader, mix: Mix) -> tuple[tuple[str, Mapping[str, int]] | None, Mix]:
    """The rule, and the mix with the tiers that only the rule names."""
    text = reader.text("trace_by")
    if not text:
        return None, mix
    name, _, pairs = text.partition(":")
    tiers, found = list(mix.tiers), dict[str, int]()
    for pair in pairs.split(","):
        value, equals, tier = (piece.strip() for piece in pair.rpartition("="))
        if name not in BY or not (value and equals and tier):
            raise reader.fault("trace_by", f"must be FIELD:VALUE=TIER,... with one of {', '.join(BY)}, got {text!r}.")
        if tier not in tiers:
            tiers.append(tier)
        found[value] = tiers.index(tier)
    return (name, found), Mix(tuple(tiers), (*mix.shares, *[0.0] * (len(tiers) - len(mix.tiers))))
