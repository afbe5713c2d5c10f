"""The settings of the backend `openai:URL`; `settings` adds all others to them. What each means is in `endpoint_texts`."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings

Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]


class EndpointSettings(BaseSettings):
    """A part of `Settings`."""

    endpoint_api_key: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    endpoint_ca_file: Path | None = None
    endpoint_cert_file: Path | None = None
    endpoint_key_file: Path | None = None
    endpoint_connect_ms: Milliseconds = 1000
    endpoint_first_byte_ms: Milliseconds | None = None
    endpoint_total_ms: Milliseconds | None = None
    endpoint_max_calls: Annotated[int, Field(ge=1, le=4096)] = 64
    endpoint_max_batches: Annotated[int, Field(ge=1, le=64)] = 8

    @property
    def endpoint_values(self) -> dict[str, Any]:
        """These as `Access` in gpu_pool has them."""
        names = (name for name in EndpointSettings.model_fields if getattr(self, name) is not None)
        return {name.removeprefix("endpoint_"): _plain(getattr(self, name)) for name in names}

    @field_validator("endpoint_api_key")
    @classmethod
    def _fits_into_a_header(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value()
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("must be printable ASCII without spaces")
        return value

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> Self:
        if self.endpoint_key_file and not self.endpoint_cert_file:
            raise ValueError("TIERLANE_ENDPOINT_CERT_FILE: must be set where TIERLANE_ENDPOINT_KEY_FILE is")
        return self


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value
