"""`tierlane chaos` as a command: defaults, checked options, exit codes and lists."""

from pathlib import Path

import pytest

from tierlane_tools.chaos.command import fault_list, main
from tierlane_tools.chaos.faults.catalogue import KINDS
from tierlane_tools.chaos.options import MAX_SEEDS, TOOL, ChaosUsageError, read_options, seed_range


def test_defaults() -> None:
    """Without options a run has 60 s, every fault of single servers, and a seed of its own."""
    options = read_options({})

    assert (options.duration, options.rate) == (60.0, 300.0)
    assert {kind.name for kind in KINDS} - {kind.name for kind in options.kinds} == {"failover", "migrate-slot"}
    assert (options.shape.gateways, options.shape.workers, options.shape.schedulers) == (3, 4, 2)
    assert read_options({}).seed != options.seed


def test_an_external_stack_gets_only_faults_that_can_be_undone() -> None:
    """No fault of `--against` needs a proxy, a limit of memory or a restart from empty."""
    kinds = {kind.name for kind in read_options({"against": "stack.json"}).kinds}

    assert {"kill-worker", "stop-redis", "flushall", "pg-lock"} <= kinds
    assert not {"delay", "cut", "maxmemory", "kill-redis", "kill-postgres", "spool-full"} & kinds


def test_a_cluster() -> None:
    """Cells are its slots; the list of faults says which need a cluster, and which cannot be used with one."""
    options = read_options({"cluster": "3", "cells": "4", "faults": "kill-redis,migrate-slot,delay"})

    assert (options.shape.cluster, options.shape.cells) == (3, 4)
    assert str(options.shape).endswith("4 cells, a cluster of 3 primaries")
    lines = {line.split()[0]: line for line in fault_list().splitlines()}
    assert lines["migrate-slot"].endswith("(only with --cluster)")
    assert lines["clock-forward"].endswith("(not with --cluster)")
    assert not lines["kill-redis"].endswith(")")


@pytest.mark.parametrize(
    "given",
    [
        {"seeds": "1-x"},
        {"seeds": "1-3", "seed": "1"},
        {"seed": "x"},
        {"duration": "5"},
        {"rate": "nan"},
        {"workers": "0"},
        {"tls": "yes"},
        {"tls": "on", "against": "stack.json"},
        {"faults": "kill-redis,earthquake"},
        {"faults": "delay", "against": "stack.json"},
        {"faults": "migrate-slot"},
        {"faults": "spool-full", "cluster": "3"},
        {"cluster": "2"},
        {"cluster": "3", "against": "stack.json"},
        {"tls": "on", "cluster": "3"},
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str | None]) -> None:
    """The message names the flag and the variable."""
    with pytest.raises(ChaosUsageError) as caught:
        read_options(given)
    assert str(caught.value).startswith(TOOL.both_names(next(iter(given))))


def test_one_seed_in_four_uses_tls() -> None:
    """The seed decides, unless the option, an external stack or a cluster does."""
    drawn = [read_options({"seed": str(seed)}).tls_to_redis for seed in range(100)]
    with_tls = str(drawn.index(True))

    assert 10 < sum(drawn) < 40
    assert [read_options({"seed": "1", "tls": tls}).tls_to_redis for tls in ("on", "off")] == [True, False]
    assert not read_options({"seed": with_tls, "against": "stack.json"}).tls_to_redis
    assert not read_options({"seed": with_tls, "cluster": "3"}).tls_to_redis


@pytest.mark.parametrize(("text", "seeds"), [("1-3", (1, 2, 3)), ("3, 7-9", (3, 7, 8, 9)), ("2,1-3", (2, 1, 3))])
def test_seeds_of_a_series(text: str, seeds: tuple[int, ...]) -> None:
    """Single seeds and ranges, each seed once, in the order of the text."""
    assert read_options({"seeds": text}).seeds == seeds


@pytest.mark.parametrize("text", ["", "1-", "-1", "3-1", "1,,2", "1.5", f"0-{MAX_SEEDS}", "9" * 19])
def test_wrong_seeds(text: str) -> None:
    """A text that names no seeds or too many is rejected."""
    with pytest.raises(ValueError, match="seed"):
        seed_range(text)


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    """The command exits before anything is started."""
    assert main(["--rate", "fast"]) == 2
    assert main(["--no-such-flag"]) == 2
    assert main(["--against", str(tmp_path / "none.json")]) == 2
    assert main(["--keep", str(tmp_path)]) == 2
    assert main(["--json", str(tmp_path / "none" / "out.json")]) == 2
