"""Traces in a simulation: engines and customers without a scenario, whose customers get the requests, and sizing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tierlane_tools.bench.plan.objectives import Objective, parse_slo
from tierlane_tools.simulate.command import main
from tierlane_tools.simulate.results import Document
from tierlane_tools.simulate.run import RequestSimulation
from tierlane_tools.simulate.scenario import ScenarioError, scenario_from
from tierlane_tools.simulate.sizing import Sizer, checked, sentences
from tierlane_tools.simulate.traces import trace_arrivals, trace_base, trace_replay
from tierlane_tools.traces.samples import sample_requests, write_samples

SECONDS, RATE = 30.0, 20.0
SAMPLE = sample_requests(SECONDS, RATE)
SIZED = sample_requests(SECONDS / 3, RATE)  # A sizing simulates its trace a dozen times.
ANSWERED = [each for each in SAMPLE if not each.failed]
TIERS = ["enterprise", "paid", "free"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"), SAMPLE)


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("sized"), SIZED)


def simulated(folder: Path, *argv: str) -> Document:
    """The result of the command."""
    found = folder / "result.json"
    assert main([*argv, "--json", str(found)]) == 0
    document: Document = json.loads(found.read_bytes())
    return document


@pytest.mark.parametrize("name", ["burstgpt", "azure", "mooncake", "vllm", "audit", "arrivals"])
def test_a_trace_needs_no_scenario(name: str, samples: dict[str, Path], tmp_path: Path) -> None:
    """All its answered requests arrive, at engines with slots, and are spread over the tiers."""
    found = simulated(tmp_path, "--trace", str(samples[name]), "--mix", "paid=1,free=1")

    assert found["requests"] == pytest.approx(len(ANSWERED), abs=1)
    assert found["simulated_s"] == pytest.approx(SECONDS, abs=2)
    assert set(found["tiers"]) == {"paid", "free"}
    for tier in found["tiers"].values():
        assert tier["arrivals"] == tier["completed"] > 40
        assert 0 < tier["first_token_p95_ms"] < tier["p50_ms"]
    assert "read" in found["notes"]["trace"]


def test_equal_seeds_give_equal_results(samples: dict[str, Path], tmp_path: Path) -> None:
    """The draws of the trace belong to the seed too."""
    argv = ["--trace", str(samples["azure"]), "--trace-rate", "9"]
    first, again = (simulated(tmp_path, *argv, "--seed", "3") for _ in range(2))

    assert first == again
    assert simulated(tmp_path, *argv, "--seed", "4")["tiers"] != first["tiers"]


def test_the_scenario_has_the_last_word(samples: dict[str, Path], tmp_path: Path) -> None:
    """Its costs and its customers of a tier; a customer of a name in the trace is that one."""
    scenario = tmp_path / "engine.yaml"
    scenario.write_text("costs: {slots: 8}\ncustomers:\n  customer-3: {tier: paid}\n  shops: {tier: paid, count: 2}\n")
    found = simulated(
        tmp_path, str(scenario), "--trace", str(samples["arrivals"]), "--mix", "paid=1,free=1", "--gpus", "8"
    )
    classes = {each["class"]: each for each in found["classes"]}

    assert set(classes) == {"customer-3", "shops", "free"}
    assert classes["customer-3"]["arrivals"] >= sum(each.session == 3 for each in ANSWERED) - 1
    assert sum(each["arrivals"] for each in classes.values()) == pytest.approx(len(ANSWERED), abs=1)


def test_the_first_token_comes_with_the_first_step(samples: dict[str, Path]) -> None:
    """Without a queue it takes one step after the present one has ended, an answer a step for each word."""
    document = base(
        samples, gpus=16, costs={"slots": 64, "step_ms": 10, "step_item_ms": 0, "dispatch_ms": 0, "call_ms": 0}
    )
    scenario = scenario_from(document)
    replay = trace_replay({"trace": str(samples["azure"])}, 1)
    assert replay is not None
    arrivals = trace_arrivals(replay, scenario)

    figures = RequestSimulation(scenario, arrivals).run().document(0.0, scenario.ends_s)

    for tier in figures["tiers"].values():
        assert 10 / 1.01 <= tier["first_token_p50_ms"] <= tier["first_token_p99_ms"] <= 20 * 1.01
    words = sorted(arrival.words for arrival in arrivals)
    assert figures["tiers"]["paid"]["p50_ms"] == pytest.approx(10 * words[len(words) // 2], rel=0.2)


def base(samples: dict[str, Path], **fields: Any) -> dict[str, Any]:
    given = {"trace": str(samples["azure"])}
    replay = trace_replay(given, 1)
    assert replay is not None
    return {**trace_base(replay, {}, given), **fields}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--trace", "nowhere.csv"], "--trace: nowhere.csv cannot be read"),
        (["--trace-rate", "5"], "SCENARIO: is missing; name a file, a trace with --trace"),
        (["--trace", "AZURE", "--mix", "gold=1"], "gold"),
        (["--trace", "AZURE", "--trace-customers", "0"], "--trace-customers"),
        (["--trace", "AZURE", "--trace-to", "x"], "--trace-to"),
        (["--trace", "AZURE", "--slo", "paid=5ms"], "--slo: each part must be TIER.METRIC=BOUND"),
        (["--trace", "AZURE", "--slo", "paid.mean=5ms"], "--slo: 'paid.mean=5ms' is not simulated"),
        (["--trace", "AZURE", "--slo", "gold.p99=5ms"], "--slo: 'gold.p99=5ms' names a tier"),
    ],
)
def test_wrong_usage(
    argv: list[str], sentence: str, samples: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the option."""
    assert main([str(samples["azure"]) if each == "AZURE" else each for each in argv]) == 2
    assert sentence in capsys.readouterr().err


ENGINE = {"slots": 16, "step_ms": 20, "step_item_ms": 0.5, "dispatch_ms": 0, "call_ms": 0}


def sizer(samples: dict[str, Path], slo: str, **fields: Any) -> tuple[Sizer, list[str]]:
    document = base(samples, costs=ENGINE, **fields)
    replay = trace_replay({"trace": str(samples["azure"])}, 1)
    assert replay is not None
    lines: list[str] = []
    objectives = checked(parse_slo(slo, TIERS))
    return Sizer(document, trace_arrivals(replay, scenario_from(document)), objectives, lines.append), lines


def test_the_fewest_gpus_meet_the_objectives_and_one_less_does_not(sized: dict[str, Path]) -> None:
    """Whatever number of GPUs the scenario begins with."""
    slo = "all.first_token_p95=200ms,all.success=99.5%"
    found = [sizer(sized, slo, gpus=gpus)[0].size() for gpus in (1, 40)]

    assert found[0].least == found[1].least
    least, one_less = found[0].least, found[0].one_less
    assert one_less is not None
    assert least.meets
    assert not one_less.meets
    assert (one_less.gpus, one_less.setting) == (least.gpus - 1, "")
    assert 3 <= least.gpus <= 20


def test_settings_for_fewer_gpus_are_tried_alone(sized: dict[str, Path]) -> None:
    """Each of them meets the objectives with its number of GPUs, and is an option that can be copied."""
    one, _ = sizer(sized, "free.first_token_p95=500ms", gpus=4)
    sizing = one.size()

    assert any(trial.setting.startswith("tiers.free.guaranteed_share=") for trial in sizing.settings)
    for trial in sizing.settings:
        assert trial.gpus < sizing.least.gpus
        assert one.trial(trial.gpus, trial.setting).meets
        assert any(f"--set {trial.setting}" in sentence for sentence in sentences(sizing))


def test_objectives_that_nothing_meets(samples: dict[str, Path]) -> None:
    """A token takes longer than that with any number of GPUs, so not all numbers are tried."""
    one, lines = sizer(samples, "all.first_token_p50=1ms", gpus=4)
    sizing = one.size()

    assert (sizing.least.gpus, sizing.least.meets, sizing.one_less) == (64, False, None)
    assert len(lines) == 5
    assert "may be out of reach" in sentences(sizing)[0]


def test_the_command_shows_and_writes_the_sizing(
    sized: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are those of the number that was found."""
    argv = ["--trace", str(sized["azure"]), "--set", "costs.slots=16", "--slo", "paid.first_token_p95=300ms"]
    found = simulated(tmp_path, *argv)
    shown = capsys.readouterr().out

    gpus = found["sizing"]["least"]["gpus"]
    assert found["sizing"]["least"]["met"]
    assert f"{gpus} GPU" in shown
    assert "paid.first_token_p95=300ms" in shown
    paid = found["tiers"]["paid"]
    assert found["sizing"]["least"]["objectives"][0]["actual"] == pytest.approx(paid["first_token_p95_ms"] / 1000)


def test_objectives_are_for_simulated_metrics() -> None:
    """Without any there is nothing to find."""
    with pytest.raises(ScenarioError):
        checked(())
    assert checked((Objective("paid", "max", 1.0, "paid.max=1s"),))
