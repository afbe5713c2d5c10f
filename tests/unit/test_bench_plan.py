"""The plan of a bench run: options, target address, mix, arrivals, stack file and keys."""

from itertools import pairwise
from pathlib import Path

import pytest

from tierlane_local.stack_file import StackFileError
from tierlane_tools.bench.command import OPTIONS, TOOL, main
from tierlane_tools.bench.plan.arrivals import Arrivals, schedule
from tierlane_tools.bench.plan.mix import Mix, MixError, parse_mix
from tierlane_tools.bench.plan.plan import BenchUsageError, TargetAddress, read_address, read_plan
from tierlane_tools.bench.tier_keys import read_keys

ONE = Mix(("only",), (1.0,))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rate", "0"),
        ("rate", "nan"),
        ("duration", "-1"),
        ("connections", "1.5"),
        ("input_bytes", "14"),
        ("mode", "half"),
        ("echo", "yes"),
        ("arrivals", "bursty"),
        ("verify", "yes"),
        ("mix", "paid"),
        ("slo", "gold.p99=1s"),
        ("max_error_rate", "2"),
        ("seed", "x"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str) -> None:
    """The message names the flag and the variable."""
    with pytest.raises(BenchUsageError) as caught:
        read_plan({option: value})

    assert str(caught.value).startswith(TOOL.both_names(option))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8080", TargetAddress("127.0.0.1", 8080, "127.0.0.1:8080", "/v1/inference")),
        ("http://localhost/", TargetAddress("localhost", 80, "localhost", "/v1/inference")),
        ("http://[::1]:9/base/", TargetAddress("::1", 9, "[::1]:9", "/base/v1/inference")),
    ],
)
def test_addresses(url: str, address: TargetAddress) -> None:
    """Host, port, Host header and path."""
    assert read_address(url) == address


@pytest.mark.parametrize("argv", [["--rate", "x"], ["--unknown"], ["--stack", "nowhere.json"], ["stray"]])
def test_wrong_usage_is_exit_code_2(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent."""
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2


def test_the_flag_precedes_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Help shows each option with its variable and default; the variable is used where no flag is given."""
    assert main(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option, text in OPTIONS.items():
        assert f"[env: {TOOL.variable(option)}] [default: {text.default or 'none'}]" in shown

    monkeypatch.setenv("TIERLANE_BENCH_RATE", "from-environment")
    assert main([]) == 2
    assert "from-environment" in capsys.readouterr().err
    assert main(["--rate", "from-flag"]) == 2
    assert "from-flag" in capsys.readouterr().err


def test_keys_of_a_file(tmp_path: Path) -> None:
    """Each line is a customer; tiers outside the mix are ignored; errors do not show the key."""
    path = tmp_path / "keys"
    path.write_text("paid,k1\n\n free , k2 \npaid,k3\ngold,k4\n")
    assert read_keys(path, ["free", "paid"]) == [["k2"], ["k1", "k3"]]

    for text, fault in (("paid,\n", "line 1"), ("free,secret\n", "'paid'")):
        path.write_text(text)
        with pytest.raises(StackFileError, match=fault) as caught:
            read_keys(path, ["paid"])
        assert "secret" not in str(caught.value)


def test_constant_arrivals() -> None:
    """They are equally spaced from 0."""
    times = [due.at_s for due in schedule(Arrivals.CONSTANT, 2.0, 2.0, ONE, 1)]

    assert times == pytest.approx([0.0, 0.5, 1.0, 1.5])


def test_poisson_arrivals() -> None:
    """Mean and deviation of 100,000 gaps are 1/rate."""
    times = [due.at_s for due in schedule(Arrivals.POISSON, 1000.0, 100.0, ONE, 7)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)

    assert mean == pytest.approx(0.001, rel=0.02)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(0.001, rel=0.02)
    assert all(0 <= time < 100 for time in times)


def test_the_seed_decides_arrivals_and_tiers() -> None:
    """The mix does not change the times; each tier gets its share."""
    mix = parse_mix("enterprise=0.3,paid=0.6,free=0.1")
    runs = [list(schedule(Arrivals.POISSON, 1000.0, 100.0, mix, seed)) for seed in (3, 3, 4)]
    tiers = [due.tier for due in runs[0]]

    assert runs[0] == runs[1] != runs[2]
    assert [due.at_s for due in runs[0]] == [due.at_s for due in schedule(Arrivals.POISSON, 1000.0, 100.0, ONE, 3)]
    assert [tiers.count(tier) / len(tiers) for tier in range(3)] == pytest.approx([0.3, 0.6, 0.1], abs=0.01)


@pytest.mark.parametrize("text", ["", "paid", "=1", "paid=1,paid=2", "paid=x", "paid=-1", "paid=inf", "paid=0"])
def test_wrong_mixes(text: str) -> None:
    """Missing and repeated tiers, and weights that are no weights."""
    with pytest.raises(MixError):
        parse_mix(text)
