"""The settings of autoscaling; `settings` adds all others to them."""

import re
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from scheduler.autoscale import ScaleRules
from tierlane.up.other_pools import MOST_WORKERS

Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]
_BOUNDS = re.compile(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*")


class ScaleSettings(BaseSettings):
    """A part of `Settings`."""

    autoscale: str = ""
    autoscale_wait_ms: Milliseconds = 500
    autoscale_need_ms: Milliseconds = 10_000
    autoscale_deep_ms: Milliseconds = 30_000
    autoscale_long_ms: Milliseconds = 60_000
    autoscale_busy_ms: Milliseconds = 300_000
    autoscale_calm_ms: Milliseconds = 900_000
    autoscale_cooldown_ms: Milliseconds = 60_000

    @property
    def scale_bounds(self) -> tuple[int, int]:
        """The least and the most workers of a pool."""
        return parse_bounds(self.autoscale) if self.autoscale else (1, MOST_WORKERS)

    @property
    def scale_rules(self) -> ScaleRules:
        """What the policy is told."""
        least, most = self.scale_bounds
        return ScaleRules(
            least=least,
            most=most,
            target_wait_s=self.autoscale_wait_ms / 1000,
            need_s=self.autoscale_need_ms / 1000,
            deep_s=self.autoscale_deep_ms / 1000,
            long_s=self.autoscale_long_ms / 1000,
            busy_s=self.autoscale_busy_ms / 1000,
            calm_s=self.autoscale_calm_ms / 1000,
            cooldown_s=self.autoscale_cooldown_ms / 1000,
        )

    @field_validator("autoscale")
    @classmethod
    def _bounds_are_meant(cls, value: str) -> str:
        if value:
            parse_bounds(value)
        return value


def parse_bounds(text: str) -> tuple[int, int]:
    """What `--autoscale` says. Raises ValueError."""
    match = _BOUNDS.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_WORKERS:
        raise ValueError(f"must be MIN:MAX, whole numbers with 1 <= MIN <= MAX <= {MOST_WORKERS}")
    return int(match[1]), int(match[2])
