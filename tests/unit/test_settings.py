"""Settings: precedence of sources, one-line errors, rules between settings, and the generated page."""

from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter

from configs import GATEWAY, WORKER
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
    """Precedence is flag > environment > file of --config > file of TIERLANE_CONFIG > ./tierlane.toml > default."""
    assert load_settings().port == 8080
    for number, name in enumerate(("tierlane.toml", "by_variable.toml", "by_flag.toml"), start=1):
        (tmp_path / name).write_text(f"port = {number}\nlease_ms = 700\n")
    assert load_settings().port == 1
    monkeypatch.setenv("TIERLANE_CONFIG", "by_variable.toml")
    assert load_settings().port == 2
    assert load_settings(config=Path("by_flag.toml")).port == 3
    monkeypatch.setenv("TIERLANE_PORT", "1002")
    monkeypatch.setenv("TIERLANE_TORCH_THREADS", "")  # Compose files pass empty variables for absent ones.
    assert load_settings().port == 1002

    settings = load_settings({"port": "1003", "host": None})

    assert (settings.port, settings.host, settings.lease_ms) == (1003, "127.0.0.1", 700)
    assert settings.torch_threads is None


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("PORT", "70000", "PORT: must be an integer from 0 to 65535, got '70000'"),
        ("TORCH_THREADS", "0", "TORCH_THREADS: must be an integer from 1 to 1024, got '0'"),
        ("LOG_FORMAT", "xml", "LOG_FORMAT: must be one of auto, console, json, got 'xml'"),
        ("EPHEMERAL", "maybe", "EPHEMERAL: must be true or false, got 'maybe'"),
        ("POOL", "{a}", "POOL: must match ^[a-z][a-z0-9_-]{0,62}$, got '{a}'"),
        ("RENEW_MS", "700", "RENEW_MS: must be less than TIERLANE_LEASE_MS (600), got 700"),
        ("POOL", "Fast", "POOL: must match ^[a-z][a-z0-9_-]{0,62}$, got 'Fast'"),
        (
            "GPU_TIMEOUT_MS",
            "3600001",
            "GPU_TIMEOUT_MS: must be less than TIERLANE_TOTAL_REQUEST_MS (600000), got 3600001",
        ),
        ("JOB_DEADLINE_MS", "3000", "GPU_TIMEOUT_MS: must be less than TIERLANE_JOB_DEADLINE_MS (3000), got 3000"),
        (
            "STORED_FILE_BYTES",
            "104857600",
            "BATCH_FILE_BYTES: must be less than TIERLANE_STORED_FILE_BYTES (104857600), got 104857600",
        ),
        ("GRPC_PORT", "8080", "GRPC_PORT: must not be TIERLANE_PORT (8080)"),
        ("JWT_JWKS", "keys.json", "JWT_AUDIENCE: must be set, or TIERLANE_JWT_ISSUER, where TIERLANE_JWT_JWKS is"),
        (
            "DATABASE_DIRECT_URL",
            "postgres://host/db",
            "DATABASE_URL: must be set where TIERLANE_DATABASE_DIRECT_URL is",
        ),
        (
            "DATABASE_URL",
            "postgres://user:p?w@host/db",
            "DATABASE_URL: must be postgresql://user:password@host:port/database, with each / ? # @ of the password percent-enc",
        ),
        ("ENDPOINT_KEY_FILE", "key.pem", "ENDPOINT_CERT_FILE: must be set where TIERLANE_ENDPOINT_KEY_FILE is"),
        ("TRACES_ENDPOINT", "collector:4317", "TRACES_ENDPOINT: must begin with http:// or https:// and name a host"),
        ("TRACES_SAMPLE", "1.5", "TRACES_SAMPLE: must be a number from 0 to 1, got '1.5'"),
        ("CORS_ORIGINS", "b/app", "CORS_ORIGINS: 'b/app' is not an origin"),
        ("AUTOSCALE", "3:1", "AUTOSCALE: must be MIN:MAX, whole numbers with 1 <= MIN <= MAX <= 256, got '3:1'"),
        ("AUTOSCALE", "2", "AUTOSCALE: must be MIN:MAX"),
        ("AUTOSCALE", "1:257", "AUTOSCALE: must be MIN:MAX"),
        ("AUTOSCALE", "-1:4", "AUTOSCALE: must be MIN:MAX"),
        ("PROT", "1", "PROT: is not a setting of Tierlane; did you mean TIERLANE_PORT?"),
        ("XYZZY_PLUGH", "1", "XYZZY_PLUGH: is not a setting of Tierlane"),
        ("CONFIG", "absent.toml", "CONFIG: cannot read absent.toml: No such file or directory"),
    ],
)
def test_a_bad_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str, line: str) -> None:
    """The message names the variable, what it must be and what it was."""
    monkeypatch.setenv(f"TIERLANE_{name}", value)

    with pytest.raises(SettingsError) as error:
        load_settings()

    assert str(error.value).startswith(f"TIERLANE_{line}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", "http://user:hunter2@host"),
        ("DATABASE_URL", "mysql://user:hunter2@host/db"),
        ("DATABASE_DIRECT_URL", "host=db password=hunter2"),
        ("DATABASE_URL", "postgresql://user:hunter2/w@host/db"),
        ("DATABASE_DIRECT_URL", "postgres://user:w#hunter2@host/db"),
        ("SERVICE_TOKEN", "hunter2"),
        ("ENDPOINT_API_KEY", "hunter2 hunter2"),
        ("TRACES_ENDPOINT", "http://user:hunter2@collector:4318"),
        ("TRACES_ENDPOINT", "http://collector:4318?key=hunter2"),
    ],
)
def test_a_bad_secret_is_not_in_the_message(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A value that may hold a password never gets into a message."""
    monkeypatch.setenv(f"TIERLANE_{name}", value)

    with pytest.raises(SettingsError) as error:
        load_settings()

    assert str(error.value).startswith(f"TIERLANE_{name}: must ")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("name", ["SERVICE_TOKEN", "DIRECT_TOKEN"])
@pytest.mark.parametrize(
    "value",
    [
        " " * 16,
        "\t" * 16,
        "\N{NO-BREAK SPACE}" * 16,
        "hunter2-hunter2-hunter2\n",
        " hunter2-hunter2-hunter2",
        "hunter2\0hunter2\0hunter2",
        "a" * 15,
        "a" * 257,
        "schlüssel-schlüssel",
    ],
)
def test_a_token_that_nobody_can_send_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Blanks would still sign cookies and direct calls, with a key that everybody knows."""
    monkeypatch.delenv(f"TIERLANE_{name}", raising=False)

    with pytest.raises(SettingsError, match=f"^TIERLANE_{name}: must have 16 to 256 printable ASCII characters"):
        load_settings({name.lower(): value})


@pytest.mark.parametrize(
    ("name", "value", "demand"),
    [
        ("CALLBACK_SECRET", " ", "whsec_"),
        ("CALLBACK_SECRET", "whsec_", "whsec_"),
        ("CALLBACK_SECRET", "whsec_" + "A" * 32, "zeros are an empty key"),
        # What docs/platform.md derives from a service token that is not set.
        ("DIRECT_TOKEN", "b5f94e79a58c0b4e9f30c404937b8425de3a46228b600f234bf61e973cd663d4", "was empty"),
        ("ENDPOINT_API_KEY", " ", "printable ASCII without spaces"),
        ("ENDPOINT_API_KEY", "\n", "printable ASCII without spaces"),
    ],
)
def test_a_secret_without_content_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, demand: str
) -> None:
    """An empty one is not set; blanks and zeros are neither unset nor secret."""
    monkeypatch.setenv(f"TIERLANE_{name}", "")
    assert load_settings()
    monkeypatch.setenv(f"TIERLANE_{name}", value)

    with pytest.raises(SettingsError, match=f"^TIERLANE_{name}: must .*{demand}"):
        load_settings()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_urls_of_the_database(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """As services show them. With a direct URL, the other one is that of a pooler, and sessions use the direct one."""
    url, direct = f"{scheme}://user@pooler:6432/db", f"{scheme}://user@host/db"
    monkeypatch.setenv("TIERLANE_DATABASE_URL", url)
    plain = load_settings()
    monkeypatch.setenv("TIERLANE_DATABASE_DIRECT_URL", direct)
    both = load_settings()

    assert (plain.session_url, plain.statement_url) == (url, url)
    assert (both.session_url, both.statement_url) == (direct, "postgresql+pooled://user@pooler:6432/db")


def test_the_longest_batch_of_an_endpoint() -> None:
    """Only the time of its requests bounds it."""
    given = {"backend": "openai:http://engine:8000", "gpu_timeout_ms": "4000000"}
    longer = {"total_request_ms": "5000000", "job_deadline_ms": "5000000"}

    assert load_settings(given | longer).gpu_timeout_ms == 4_000_000
    with pytest.raises(SettingsError, match=r"^TIERLANE_GPU_TIMEOUT_MS: must be less than TIERLANE_TOTAL_REQUEST_MS"):
        load_settings(given)


def test_secrets_are_not_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings may be logged as a whole."""
    monkeypatch.setenv("TIERLANE_REDIS_URL", "redis://:hunter2@host")
    monkeypatch.setenv("TIERLANE_SERVICE_TOKEN", "hunter2-hunter2-hunter2")
    hidden = {name for name, field in Settings.model_fields.items() if not field.repr}

    assert "hunter2" not in repr(load_settings())
    assert hidden == {name for name, setting in SETTINGS.items() if setting.secret} | {"traces_endpoint"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port = -1", r"^TIERLANE_PORT: .* got -1 \(set in tierlane.toml\)$"),
        ("prot = 1", r"^tierlane.toml: prot: is not a setting of Tierlane; did you mean port\?$"),
        ("port = ", r"^TIERLANE_CONFIG: tierlane.toml is not valid TOML: "),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, line: str) -> None:
    """A typo in the file is reported like a typo in a variable."""
    (tmp_path / "tierlane.toml").write_text(text)

    with pytest.raises(SettingsError, match=line):
        load_settings()


def test_a_bad_flag_and_a_missing_setting_are_named() -> None:
    """A message has the flag beside its variable; a role without its database names the variable to set."""
    with pytest.raises(SettingsError, match=r"^TIERLANE_PORT: .* \(set by --port\)$"):
        load_settings({"port": "x"})
    with pytest.raises(SettingsError, match=r"^TIERLANE_DATABASE_URL: is not set; "):
        load_settings(required=("database_url",))


def test_the_model_has_each_declared_setting_with_its_default() -> None:
    """A default as shown, read from a flag, is that default; rules and needs name declared settings."""
    named = {name for rule in ORDERED for name in (rule.smaller, rule.larger)}
    default = load_settings()

    assert set(SETTINGS) == set(Settings.model_fields)
    assert sum(len(settings_of(section)) for section in SECTIONS.values()) == len(SETTINGS)
    assert load_settings({name: setting.default for name, setting in SETTINGS.items() if setting.default}) == default
    assert named | {setting.needs for setting in SETTINGS.values() if setting.needs} <= set(SETTINGS)
    assert default.log_format == "json"  # `auto` is resolved here; the output of a test is no terminal.


def test_autoscale_settings_are_the_rules_of_the_policy() -> None:
    """Milliseconds become seconds; without bounds the advice has those of `--workers`."""
    rules = load_settings({"autoscale": "2:8", "autoscale_calm_ms": "4500", "autoscale_wait_ms": "250"}).scale_rules

    assert (rules.least, rules.most, rules.calm_s, rules.target_wait_s) == (2, 8, 4.5, 0.25)
    assert load_settings().scale_bounds == (1, 256)


@pytest.mark.parametrize("config", [GATEWAY, WORKER], ids=["gateway", "worker"])
def test_fields_of_a_config_have_their_types(config: object) -> None:
    """Also those with the value of the setting of their name."""
    for name, kind in get_type_hints(type(config)).items():
        TypeAdapter(kind).validate_python(getattr(config, name), strict=True)


def test_the_page_is_current() -> None:
    """`make docs` writes docs/configuration.md."""
    assert PAGE.read_text() == configuration_page()
