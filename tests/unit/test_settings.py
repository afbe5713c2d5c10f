"""The settings: precedence, one-line errors, rules between timings, and the generated page."""

from pathlib import Path

import pytest

from tierlane.settings.__main__ import configuration_page
from tierlane.settings.declaration import settings_of, variable
from tierlane.settings.model import Settings, SettingsError, load_settings
from tierlane.settings.sections import ORDERED, SECTIONS, SETTINGS

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from outside: neither variables nor a file in the current directory."""
    for name in [*SETTINGS, "config"]:
        monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.chdir(tmp_path)


def test_each_source_is_overridden_by_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Precedence is flag > environment > file > default."""
    assert load_settings().port == 8080
    (tmp_path / "tierlane.toml").write_text("port = 1001\nlease_ms = 700\n")
    assert load_settings().port == 1001
    monkeypatch.setenv("TIERLANE_PORT", "1002")
    assert load_settings().port == 1002

    settings = load_settings({"port": "1003", "host": None})

    assert (settings.port, settings.host, settings.lease_ms) == (1003, "127.0.0.1", 700)


def test_the_named_file_wins_over_the_one_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--config is preferred to TIERLANE_CONFIG, and that to ./tierlane.toml."""
    for number, name in enumerate(("tierlane.toml", "by_variable.toml", "by_flag.toml"), start=1):
        (tmp_path / name).write_text(f"port = {number}\n")
    assert load_settings().port == 1
    monkeypatch.setenv("TIERLANE_CONFIG", "by_variable.toml")
    assert load_settings().port == 2

    assert load_settings(config=Path("by_flag.toml")).port == 3


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and shells pass empty variables for absent ones."""
    monkeypatch.setenv("TIERLANE_TORCH_THREADS", "")

    assert load_settings().torch_threads is None


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("TIERLANE_PORT", "abc", "TIERLANE_PORT: must be an integer from 0 to 65535, got 'abc'"),
        ("TIERLANE_PORT", "70000", "TIERLANE_PORT: must be an integer from 0 to 65535, got '70000'"),
        ("TIERLANE_TORCH_THREADS", "0", "TIERLANE_TORCH_THREADS: must be an integer from 1 to 1024, got '0'"),
        ("TIERLANE_LOG_FORMAT", "xml", "TIERLANE_LOG_FORMAT: must be one of auto, console, json, got 'xml'"),
        ("TIERLANE_EPHEMERAL", "maybe", "TIERLANE_EPHEMERAL: must be true or false, got 'maybe'"),
        ("TIERLANE_POOL", "{a}", "TIERLANE_POOL: must match ^[A-Za-z0-9_-]{1,64}$, got '{a}'"),
        (
            "TIERLANE_RENEW_MS",
            "700",
            "TIERLANE_RENEW_MS: must be less than TIERLANE_LEASE_MS (600), got 700, or a lease runs out before it is renewed",
        ),
        (
            "TIERLANE_ENDPOINT_KEY_FILE",
            "key.pem",
            "TIERLANE_ENDPOINT_CERT_FILE: must be set where TIERLANE_ENDPOINT_KEY_FILE is",
        ),
        (
            "TIERLANE_TRACES_ENDPOINT",
            "collector:4317",
            "TIERLANE_TRACES_ENDPOINT: must begin with http:// or https:// and name a host",
        ),
        ("TIERLANE_TRACES_SAMPLE", "1.5", "TIERLANE_TRACES_SAMPLE: must be a number from 0 to 1, got '1.5'"),
        ("TIERLANE_TRACES_TRUST_CALLERS", "yes", "TIERLANE_TRACES_TRUST_CALLERS: must be one of on, off, got 'yes'"),
        (
            "TIERLANE_CORS_ORIGINS",
            "b/app",
            "TIERLANE_CORS_ORIGINS: 'b/app' is not an origin: scheme://host or scheme://host:port without a path, or * alone, got 'b/app'",
        ),
        ("TIERLANE_PROT", "1", "TIERLANE_PROT: is not a setting of Tierlane; did you mean TIERLANE_PORT?"),
        ("TIERLANE_XYZZY_PLUGH", "1", "TIERLANE_XYZZY_PLUGH: is not a setting of Tierlane"),
        ("TIERLANE_CONFIG", "absent.toml", "TIERLANE_CONFIG: cannot read absent.toml: No such file or directory"),
    ],
)
def test_a_bad_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str) -> None:
    """The message names the variable, what it must be and what it was."""
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as error:
        load_settings()

    assert str(error.value) == line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIERLANE_REDIS_URL", "http://user:hunter2@host"),
        ("TIERLANE_DATABASE_URL", "postgresql://user:hunter2@host/db"),
        ("TIERLANE_SERVICE_TOKEN", "hunter2"),
        ("TIERLANE_ENDPOINT_API_KEY", "hunter2 hunter2"),
        ("TIERLANE_TRACES_ENDPOINT", "http://user:hunter2@collector:4318"),
        ("TIERLANE_TRACES_ENDPOINT", "http://collector:4318?key=hunter2"),
    ],
)
def test_a_bad_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """What may hold a password never gets into a message."""
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as error:
        load_settings()

    assert str(error.value).startswith(f"{name}: must ")
    assert "hunter2" not in str(error.value)


def test_secrets_are_not_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings may be logged as a whole."""
    monkeypatch.setenv("TIERLANE_REDIS_URL", "redis://:hunter2@host")
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", "hunter2-hunter2-hunter2")

    assert "hunter2" not in repr(load_settings())


def test_the_message_says_where_a_setting_was_set(tmp_path: Path) -> None:
    """A flag and a file are named beside the variable."""
    with pytest.raises(SettingsError, match=r"^TIERLANE_PORT: .* \(set by --port\)$"):
        load_settings({"port": "x"})
    (tmp_path / "tierlane.toml").write_text("port = -1\n")
    with pytest.raises(SettingsError, match=r"^TIERLANE_PORT: .* got -1 \(set in tierlane.toml\)$"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prot = 1", r"^tierlane.toml: prot: is not a setting of Tierlane; did you mean port\?$"),
        ("port = ", r"^TIERLANE_CONFIG: tierlane.toml is not valid TOML: "),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    """A typo in the file is told like a typo in a variable."""
    (tmp_path / "tierlane.toml").write_text(text)

    with pytest.raises(SettingsError, match=line):
        load_settings()


def test_a_required_setting_is_named_with_its_meaning() -> None:
    """A role without its database says which variable is missing."""
    with pytest.raises(SettingsError, match=r"^TIERLANE_DATABASE_URL: is not set; PostgreSQL to use"):
        load_settings(required=("database_url",))


def test_the_log_format_is_decided_at_loading() -> None:
    """Auto never reaches a role; the output of a test is no terminal."""
    assert load_settings().log_format == "json"


def test_the_model_has_each_declared_setting_with_its_default() -> None:
    """Pydantic finds the declarations of all sections, and a default as shown, read from a variable, is that default."""
    assert set(SETTINGS) == set(Settings.model_fields)
    assert sum(len(settings_of(section)) for section in SECTIONS.values()) == len(SETTINGS)
    default = load_settings()

    given = load_settings({name: setting.default for name, setting in SETTINGS.items() if setting.default})

    assert given == default


def test_secrets_are_hidden() -> None:
    """No message and no repr shows a setting without a flag."""
    hidden = {name for name, field in Settings.model_fields.items() if not field.repr}

    assert hidden == {name for name, setting in SETTINGS.items() if setting.secret} | {"traces_endpoint"}


def test_rules_name_settings() -> None:
    """What a rule or a declaration says of another setting is about one that exists."""
    named = {name for rule in ORDERED for name in (rule.smaller, rule.larger)}

    assert named | {setting.needs for setting in SETTINGS.values() if setting.needs} <= set(SETTINGS)


def test_every_time_says_its_unit() -> None:
    """A name that ends in _ms has a description in milliseconds."""
    for name, setting in SETTINGS.items():
        assert name.endswith("_ms") == ("Milliseconds" in setting.description), name


def test_the_page_is_current() -> None:
    """`make docs` writes docs/configuration.md; it holds every setting."""
    page = configuration_page()

    assert PAGE.read_text() == page
    assert all(variable(name) in page for name in SETTINGS)
