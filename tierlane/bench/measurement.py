"""Everything that one run found: what the tables, the document and the verdict are made from."""

from dataclasses import dataclass, field
from datetime import datetime

from tierlane.bench.batches import BatchUse
from tierlane.bench.echo import EchoResult
from tierlane.bench.histogram import Histogram
from tierlane.bench.resources import CpuUse
from tierlane.bench.tally import Silence, TierTally
from tierlane.bench.timeline import Moment
from tierlane.bench.verification import AuditResult


@dataclass
class Measurement:
    """Everything that one run found."""

    started_at: datetime
    window_began_at: datetime
    warmup: list[TierTally]
    measured: list[TierTally]
    lag: Histogram = field(default_factory=Histogram)
    window_s: float = 0.0  # How long the window was measured in truth.
    window_answers: int = 0  # Answers that came in it, which its CPU seconds are divided by.
    window_completed: list[tuple[int, int]] = field(default_factory=list)  # By tier: 200 answers in it, good ones.
    cpu: CpuUse = field(default_factory=CpuUse)
    own_cpu_s: float = 0.0
    rss: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))  # Bytes by role, at both ends.
    echo: EchoResult | None = None
    batches: BatchUse | None = None
    padding_waste: float | None = None  # Share of the late batches' positions; None where it is not known.
    timeline: list[Moment] = field(default_factory=list)
    waited_for_connection: int = 0
    verify: str = ""
    verified: int = 0
    crossed: int = 0
    strays: int = 0
    repeated_ids: int = 0
    without_id: int = 0
    details: dict[Silence, str] = field(default_factory=dict)
    audit: AuditResult | None = None
    interrupted: bool = False
