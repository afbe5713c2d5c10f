"""The settings of asynchronous jobs and their callbacks; `settings` adds all others to them."""

from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings

from gateway.host_lists import host_list
from gateway.jobs.signature import secret_bytes

Milliseconds = Annotated[int, Field(ge=1, le=86_400_000)]


class JobSettings(BaseSettings):
    """A part of `Settings`."""

    job_deadline_ms: Milliseconds = 600_000
    job_result_ms: Milliseconds = 600_000
    callback_hosts: str = ""
    callback_secret: Annotated[SecretStr, Field(repr=False)] = SecretStr("")
    callback_private_addresses: bool = False
    callback_shared_signature: bool = False

    @property
    def callback_host_list(self) -> tuple[str, ...]:
        """The hosts one by one."""
        return host_list(self.callback_hosts)

    @property
    def callback_key(self) -> bytes:
        """What signs callbacks; empty where there are none."""
        secret = self.callback_secret.get_secret_value()
        return secret_bytes(secret) if secret else b""

    @field_validator("callback_hosts")
    @classmethod
    def _known_hosts(cls, value: str) -> str:
        host_list(value)
        return value

    @field_validator("callback_secret")
    @classmethod
    def _known_secret(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value():
            secret_bytes(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _signed(self) -> Self:
        if self.callback_hosts and not self.callback_secret.get_secret_value():
            raise ValueError("TIERLANE_CALLBACK_SECRET: must be set where TIERLANE_CALLBACK_HOSTS is")
        return self
