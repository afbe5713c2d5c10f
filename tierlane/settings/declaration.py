"""How a setting is declared: one call holds its default, text, range and checks; the annotation holds its type.

    class GatewaySettings:
        port: int = tcp_port(8080, "TCP port to listen on; 0 lets the system choose.")

The call returns a `dataclasses.Field`, from which pydantic takes default, range and visibility (`model`). The command
line, the help and docs/configuration.md take the rest (`settings_of`). Only the standard library is used, because
`--help` must be quick.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIX = "TIERLANE_"
CONFIG_VARIABLE = "TIERLANE_CONFIG"
DEFAULT_CONFIG_FILE = "tierlane.toml"

MAX_MILLISECONDS = 86_400_000
_SETTING = "setting"
"""The key of a field's metadata under which its `Setting` is."""


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Return the long command line flag of a setting or an option."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, eq=False, repr=False)  # Python generates these methods at each start.
class Option:
    """A command line option: its default ("" for none), its description, the placeholder and the range of its value.

    A switch takes no value. Without a placeholder, typer shows the type.
    """

    default: str
    description: str
    metavar: str | None = "TEXT"
    minimum: float | None = None
    maximum: float | None = None
    switch: bool = False

    def help(self, variable: str) -> str:
        """Return the help; `variable` is the environment variable that also gives the value."""
        return f"{self.description} [env: {variable}] [default: {self.default or 'none'}]"


@dataclass(frozen=True, eq=False, repr=False)
class Setting(Option):
    """A setting, beside its type: also the checks that pydantic does not do."""

    secret: bool = False
    """It has no flag, since command lines are visible to every user of a host."""

    check: Callable[[Any], Any] | None = None
    """Called with a value of the right type and range; returns the value to use. Raises ValueError."""

    needs: str = ""
    """Another setting that must be set if this one is."""


def setting(
    default: object,
    description: str,
    metavar: str = "TEXT",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    pattern: str | None = None,
    not_empty: bool = False,
    secret: bool = False,
    hidden: bool = False,
    switch: bool = False,
    check: Callable[[Any], Any] | None = None,
    needs: str = "",
) -> Any:
    """Declare a setting. `hidden`: its value may hold a password, so no message shows it; a `secret` is hidden, too."""
    text = "" if default is None else str(default)
    shown = text.lower() if isinstance(default, bool) else text
    declared = Setting(shown, description, metavar, minimum, maximum, switch, secret, check, needs)
    limits = {"ge": minimum, "le": maximum, "pattern": pattern, "min_length": 1 if not_empty else None}
    given = {name: value for name, value in limits.items() if value is not None}
    return dataclasses.field(default=default, repr=not (secret or hidden), metadata={_SETTING: declared, **given})


def number(default: int | None, description: str, *, minimum: int = 1, maximum: int) -> Any:
    """Declare a setting whose value is an integer."""
    return setting(default, description, "N", minimum=minimum, maximum=maximum)


def tcp_port(default: int, description: str) -> Any:
    """Declare a TCP port."""
    return number(default, description, minimum=0, maximum=65_535)


def memory(default: int, description: str) -> Any:
    """Declare a number of bytes, from 1 MiB to 1 TiB."""
    return number(default, description, minimum=1 << 20, maximum=1 << 40)


def share(default: float, description: str, *, minimum: float = 0, maximum: float = 1) -> Any:
    """Declare a share of a whole."""
    return setting(default, description, "SHARE", minimum=minimum, maximum=maximum)


def milliseconds(default: int | None, description: str, *, minimum: int = 1, maximum: int = MAX_MILLISECONDS) -> Any:
    """Declare a time; its name ends in `_ms` and its description says milliseconds."""
    return number(default, description, minimum=minimum, maximum=maximum)


def boolean(description: str, *, switch: bool = False) -> Any:
    """Declare a setting that is false unless it is set."""
    return setting(default=False, description=description, switch=switch)


def settings_of(*sections: type) -> dict[str, Setting]:
    """Return the settings that these classes declare, by name, in their order."""
    return {
        name: value.metadata[_SETTING]
        for section in sections
        for name, value in vars(section).items()
        if isinstance(value, dataclasses.Field)
    }
