"""Options: defaults, checks, and errors that name the option; and the help that shows them."""

import re
import sys
from pathlib import Path

import pytest

from tierlane.bench.command import OPTIONS, TOOL, main
from tierlane.bench.plan import NONCE_CHARACTERS, BenchUsageError, TargetAddress, read_address, read_plan
from tierlane.bench.resources import StackFileError, StackInfo, keys_for, read_keys, read_stack


def test_the_defaults_are_a_valid_plan() -> None:
    """Without options the run is that of the documentation."""
    plan = read_plan({})

    assert (plan.rate, plan.duration, plan.warmup, plan.connections, plan.timeout) == (1000, 60, 3, 128, 10)
    assert dict(zip(plan.mix.tiers, plan.mix.shares, strict=True)) == {"enterprise": 0.3, "paid": 0.6, "free": 0.1}
    assert NONCE_CHARACTERS + len(plan.filler) == 32


def test_a_seed_is_drawn_when_none_is_given() -> None:
    """Two runs differ unless asked not to."""
    assert read_plan({}).seed != read_plan({}).seed
    assert read_plan({"seed": "7"}).seed == 7


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("rate", "0", "--rate (TIERLANE_BENCH_RATE): must be a number above 0"),
        ("rate", "fast", "got 'fast'"),
        ("rate", "nan", "got 'nan'"),
        ("rate", "inf", "got 'inf'"),
        ("duration", "-1", "--duration"),
        ("warmup", "-0.5", "must be a number of 0 or more"),
        ("connections", "0", "must be an integer from 1 to 20000, got '0'"),
        ("connections", "1.5", "--connections"),
        ("input_bytes", "14", "--input-bytes (TIERLANE_BENCH_INPUT_BYTES): must be an integer from 15"),
        ("mode", "half", "must be one of open, closed"),
        ("echo", "yes", "must be one of auto, on, off"),
        ("arrivals", "bursty", "must be one of poisson, constant, got 'bursty'"),
        ("verify", "yes", "must be one of auto, reversed, off"),
        ("mix", "paid", "--mix (TIERLANE_BENCH_MIX): each part must be TIER=WEIGHT"),
        ("slo", "gold.p99=1s", "names a tier that is not in the mix"),
        ("max_error_rate", "2", "--max-error-rate (TIERLANE_BENCH_MAX_ERROR_RATE): must be a share"),
        ("seed", "x", "--seed"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str, fault: str) -> None:
    """One sentence with the flag, the variable, what is wanted, and what was given."""
    with pytest.raises(BenchUsageError) as caught:
        read_plan({option: value})

    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8080", TargetAddress("127.0.0.1", 8080, "127.0.0.1:8080", "/v1/inference")),
        ("http://localhost/", TargetAddress("localhost", 80, "localhost", "/v1/inference")),
        ("http://[::1]:9/base/", TargetAddress("::1", 9, "[::1]:9", "/base/v1/inference")),
    ],
)
def test_urls_that_can_be_used(url: str, address: TargetAddress) -> None:
    """Host, port, Host header and path."""
    assert read_address(url) == address


@pytest.mark.parametrize(
    "url", ["", "https://h", "h:80", "http://", "http://h:x", "http://u@h", "http://h?q", "http://h\n"]
)
def test_urls_that_cannot_be_used(url: str) -> None:
    """TLS is not spoken, and nothing is guessed."""
    with pytest.raises(BenchUsageError, match="--url"):
        read_address(url)


def test_the_help_shows_each_option_with_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag, its variable and its default."""
    assert main(["--help"]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)

    for option, text in OPTIONS.items():
        assert f"[env: {TOOL.variable(option)}] [default: {text.default or 'none'}]" in shown


@pytest.mark.parametrize("argv", [["--rate", "x"], ["--unknown"], ["--stack", "nowhere.json"], ["stray"]])
def test_wrong_usage_is_exit_code_2(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent, and the reason is told on the error stream."""
    monkeypatch.chdir(tmp_path)

    assert main(argv) == 2
    assert argv[-1].lstrip("-") in capsys.readouterr().err


def test_a_variable_is_a_flag_that_is_not_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag wins over the variable, the variable over the default."""
    monkeypatch.setenv("TIERLANE_BENCH_RATE", "from-environment")

    assert main([]) == 2
    assert "from-environment" in capsys.readouterr().err
    assert main(["--rate", "from-flag"]) == 2
    assert "from-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"), [("{", "is not a stack file"), ("[]", "is not a stack file"), ('{"keys": 1}', "keys")]
)
def test_a_broken_stack_file_is_named(text: str, fault: str, tmp_path: Path) -> None:
    """The path and the fault in one sentence."""
    path = tmp_path / "stack.json"
    path.write_text(text)

    with pytest.raises(StackFileError, match=fault):
        read_stack(path)


def test_a_tier_without_a_key_is_named() -> None:
    """The mix may ask only for tiers that the stack file has keys for."""
    stack = StackInfo(keys={"paid": "k"})

    assert keys_for(stack, ["paid"]) == [["k"]]
    with pytest.raises(StackFileError, match="no key for the tier 'gold'; it has paid"):
        keys_for(stack, ["paid", "gold"])


def test_a_file_of_keys_gives_each_tier_its_customers(tmp_path: Path) -> None:
    """A line for each customer, in the order of the file; blank lines and tiers outside of the mix do not matter."""
    path = tmp_path / "keys"
    path.write_text("paid,k1\n\n free , k2 \npaid,k3\ngold,k4\n")

    assert read_keys(path, ["free", "paid"]) == [["k2"], ["k1", "k3"]]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("paid\n", "line 1: must be TIER,KEY"),
        ("paid,\n", "line 1"),
        ("free,k\n", "no key for the tier 'paid'; it has free"),
    ],
)
def test_a_broken_file_of_keys_is_named(text: str, fault: str, tmp_path: Path) -> None:
    """The line, but not what it holds."""
    path = tmp_path / "keys"
    path.write_text(text)

    with pytest.raises(StackFileError, match=fault):
        read_keys(path, ["paid"])


def test_a_report_without_matplotlib_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long run is not thrown away at its end."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    stack = tmp_path / "stack.json"
    stack.write_text('{"keys": {"paid": "k"}, "http_url": "http://127.0.0.1:1"}')

    assert main(["--stack", str(stack), "--mix", "paid=1", "--report", str(tmp_path / "report")]) == 2
    assert "--report (TIERLANE_BENCH_REPORT): matplotlib is not installed" in capsys.readouterr().err
