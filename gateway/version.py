"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed distribution; "0" in a checkout that was never installed."""
    try:
        return version("tierlane")
    except PackageNotFoundError:
        return "0"
