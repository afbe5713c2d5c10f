"""`tierlane chaos` as a command: its options, its help, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from tierlane.chaos.command import OPTIONS, TOOL, ChaosUsageError, main, read_options
from tierlane.chaos.faults.actions import DOING
from tierlane.chaos.faults.catalogue import KINDS
from tierlane.settings.declaration import flag

HEAVY = {"pydantic", "redis", "aiohttp", "sqlalchemy", "asyncpg", "rich", "psutil", "uvloop"}


def test_the_defaults_are_those_of_the_help() -> None:
    """Without any flag: 60 s, 300 requests/s, 3 gateways, 4 workers, 2 schedulers, every fault, a seed that is drawn."""
    options = read_options({})

    assert (options.duration, options.rate) == (60.0, 300.0)
    assert str(options.shape) == "3 gateways, 4 workers, 2 schedulers"
    assert options.kinds == KINDS
    assert read_options({}).seed != options.seed
    assert (options.against, options.json, options.keep, options.quiet) == (None, None, None, False)


def test_every_fault_of_the_catalogue_can_be_done() -> None:
    """The table and the modules that do the faults name the same ones; one that repeats a blow has that of the blow."""
    assert set(DOING) == {kind.name for kind in KINDS if not kind.repeats}
    assert {kind.repeats for kind in KINDS if kind.repeats} <= set(DOING)


def test_a_stack_that_is_not_ours_gets_only_what_can_be_undone() -> None:
    """With --against no fault needs a proxy, a limit of memory or a restart from empty."""
    kinds = {kind.name for kind in read_options({"against": "stack.json"}).kinds}

    assert {"kill-worker", "stop-redis", "flushall", "pg-lock"} <= kinds
    assert not {"delay", "cut", "maxmemory", "kill-redis", "kill-postgres", "spool-full"} & kinds


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seeds": "1-x"}, "--seeds (TIERLANE_CHAOS_SEEDS): '1-x' is neither a seed nor two"),
        ({"seeds": "1-3", "seed": "1"}, "--seeds (TIERLANE_CHAOS_SEEDS): cannot be given together with --seed"),
        ({"seed": "x"}, "--seed (TIERLANE_CHAOS_SEED): must be an integer"),
        ({"duration": "5"}, "--duration (TIERLANE_CHAOS_DURATION): must be a number from 8"),
        ({"rate": "nan"}, "--rate (TIERLANE_CHAOS_RATE): must be a number"),
        ({"workers": "0"}, "--workers (TIERLANE_CHAOS_WORKERS): must be an integer from 1"),
        ({"tls": "yes"}, "--tls (TIERLANE_CHAOS_TLS): must be on, off or seed, got 'yes'"),
        ({"tls": "on", "against": "stack.json"}, "--tls (TIERLANE_CHAOS_TLS): cannot be changed on a stack"),
        ({"faults": "kill-redis,earthquake"}, "there is no fault 'earthquake'"),
        ({"faults": "delay", "against": "stack.json"}, "delay cannot be done to a stack that is not our own"),
    ],
)
def test_a_wrong_option_is_named_in_one_sentence(given: dict[str, str | None], told: str) -> None:
    """What is wrong, by flag and by variable."""
    with pytest.raises(ChaosUsageError) as caught:
        read_options(given)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_seed_draws_whether_roles_talk_tls() -> None:
    """About one in four, the same each time; `on` and `off` are for all seeds. A stack that is up is what it is."""
    drawn = [read_options({"seed": str(seed)}).tls_to_redis for seed in range(100)]
    assert 10 < sum(drawn) < 40
    assert drawn == [read_options({"seed": str(seed)}).tls_to_redis for seed in range(100)]
    assert [read_options({"seed": "1", "tls": tls}).tls_to_redis for tls in ("on", "off")] == [True, False]
    with_tls = str(drawn.index(True))
    assert read_options({"seed": with_tls}).stack.endswith("schedulers, TLS to Redis")
    assert not read_options({"seed": with_tls, "against": "stack.json"}).tls_to_redis


def test_named_faults_are_taken_once_each() -> None:
    """In the order in which they are named."""
    assert [kind.name for kind in read_options({"faults": "cut, flushall,cut"}).kinds] == ["cut", "flushall"]


def test_wrong_usage_ends_with_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before anything is started."""
    assert main(["--rate", "fast"]) == 2
    assert main(["--no-such-flag"]) == 2
    assert main(["--against", str(tmp_path / "none.json")]) == 2
    assert main(["--keep", str(tmp_path)]) == 2
    assert main(["--json", str(tmp_path / "none" / "out.json")]) == 2
    assert "is the stack up?" in capsys.readouterr().err


def test_the_help_shows_every_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag is followed by [env: X] [default: Y]."""
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())

    for name, text in OPTIONS.items():
        assert flag(name) in shown
        assert f"[env: {TOOL.variable(name)}] [default: {text.default or 'none'}]" in shown


def test_the_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """By name, with what each does."""
    assert main(["--faults", "list"]) == 0
    shown = capsys.readouterr().out

    assert all(f"{kind.name} " in shown and kind.says in shown for kind in KINDS)


def test_the_help_imports_nothing_heavy() -> None:
    """It is shown at once."""
    code = "import sys; from tierlane.chaos.command import main; main(['--help']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)

    assert not HEAVY & {name.partition(".")[0] for name in shown.stdout.splitlines()[-1].split()}
