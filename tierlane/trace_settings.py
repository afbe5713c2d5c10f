"""The settings of traces; `settings` adds all others to them. What each means is in `trace_texts`."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings


class TraceSettings(BaseSettings):
    """A part of `Settings`."""

    traces_endpoint: Annotated[str, Field(repr=False)] = ""  # Somebody may try to put a password into it.
    traces_sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    traces_trust_callers: Literal["on", "off"] = "off"

    @field_validator("traces_endpoint")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("must be an address alone; what it wants to be shown goes into OTEL_EXPORTER_OTLP_HEADERS")
        return value.rstrip("/")
