"""The settings of the local stack, `tierlane up`; `settings` adds all others to them."""

import os
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from tierlane.up.other_pools import PoolsError, parse_pools


class StackSettings(BaseSettings):
    """A part of `Settings`."""

    pool: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "default"
    gateways: Annotated[int, Field(ge=1, le=64)] | None = None
    schedulers: Annotated[int, Field(ge=0, le=64)] = 2
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    pools: str = ""
    ephemeral: bool = False
    replace: bool = False

    @property
    def gateway_count(self) -> int:
        """How many gateways to start: the setting, else two, or one where both would share a single core."""
        return self.gateways or min(2, os.cpu_count() or 1)

    @model_validator(mode="after")
    def _pools_are_meant(self) -> Self:
        try:
            parse_pools(self.pools, self.pool)
        except PoolsError as error:
            raise ValueError(f"TIERLANE_POOLS: {error}") from None
        return self
