"""The command `tierlane simulate`: its argument and options. The rest is imported when it runs."""
# ruff: noqa: PLC0415 - see above

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlane.command import (
    Config,
    DataDir,
    HelpOption,
    Pool,
    Verb,
    VerbCommand,
    carry_out,
    option,
    run_group,
    single_verb,
    with_example,
)

if TYPE_CHECKING:
    from tierlane.settings.model import Settings
    from tierlane_tools.simulate.recorded import RecordedTraffic
    from tierlane_tools.simulate.scenario import SimulationScenario

app = single_verb()

EXAMPLE = "simulate scenario.yaml --json result.json\nsimulate --from 2026-11-20 --to 2026-11-21 --gpus 6"


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "simulate", argv)


# An own help option, because typer imports pydantic to check the built-in one.
@app.command(
    epilog=with_example(EXAMPLE, "Exit codes: 0 done, 1 failed, 2 wrong usage or scenario."),
    cls=VerbCommand,
    add_help_option=False,
)
def simulate(
    *,
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO", help="Scenario in YAML; optional with --from and --to.")
    ] = None,
    first: Annotated[str | None, option("--from", "First day or time (UTC) of recorded requests.")] = None,
    last: Annotated[str | None, option("--to", "Last day, or time (UTC) of their end.")] = None,
    gpus: Annotated[str | None, option("--gpus", "Number of GPUs.", "the scenario's", metavar="N")] = None,
    seed: Annotated[str | None, option("--seed", "Seed; equal ones give equal results.", "1", metavar="N")] = None,
    changes: Annotated[
        list[str] | None, option("--set", "Change one field of the scenario; can be repeated.", metavar="FIELD=VALUE")
    ] = None,
    json: Annotated[Path | None, option("--json", "Write all figures to this file.", metavar="FILE")] = None,
    plots: Annotated[Path | None, option("--plots", "Draw plots (SVG) in this folder.", metavar="FOLDER")] = None,
    config: Config = None,
    data_dir: DataDir = None,
    pool: Pool = None,
    help_: HelpOption = False,  # noqa: ARG001 - its callback shows the help
) -> None:
    """Simulate a scenario, or recorded requests with other limits, tiers or GPUs, in virtual time."""
    given = [*(changes or []), *([f"gpus={gpus}"] if gpus else []), *([f"seed={seed}"] if seed else [])]

    def prepare() -> Verb:
        return lambda settings: _run(settings, scenario, (first, last), given, (json, plots))

    carry_out(prepare, config, database=False, data_dir=data_dir, pool=pool)


def _run(
    settings: "Settings",
    path: Path | None,
    times: tuple[str | None, str | None],
    changes: list[str],
    outputs: tuple[Path | None, Path | None],
) -> int:
    from tierlane_tools.simulate.recorded import RecordedTraffic, from_file, numbered
    from tierlane_tools.simulate.report import draw, require_plots, show, write_json
    from tierlane_tools.simulate.scenario import (
        DEFAULTS,
        ScenarioError,
        merged,
        read_document,
        scenario_from,
        with_settings,
    )

    json, plots = outputs
    if plots:
        require_plots()
    document = read_document(path) if path else {}
    recording = _recorded(settings, *times)
    if recording is None and path is None:
        raise ScenarioError("SCENARIO: is missing; name a file, or recorded requests with --from and --to.")
    base = recording.base if recording else DEFAULTS
    scenario = scenario_from(with_settings(merged(base, document), changes))
    arrivals = numbered(recording, scenario) if recording else []
    if scenario.arrivals:
        folder = path.parent if path else Path()
        arrivals = sorted([*arrivals, *from_file(folder / scenario.arrivals, scenario)])
    result = run_scenario(scenario, arrivals, recording or RecordedTraffic())
    show(result)
    if json:
        write_json(json, result)
    if plots:
        draw(plots, result)
    return 0


def _recorded(settings: "Settings", first: str | None, last: str | None) -> "RecordedTraffic | None":
    from tierlane.connect import reachable
    from tierlane_tools.simulate.recorded import from_audit, time_range
    from tierlane_tools.simulate.scenario import ScenarioError

    if first is None and last is None:
        return None
    if first is None or last is None:
        missing = "--from" if first is None else "--to"
        raise ScenarioError(f"{missing}: is missing; recorded requests need both --from and --to.")
    begin, end = time_range(first, last)
    return asyncio.run(from_audit(reachable(settings), begin, end))


def run_scenario(scenario: "SimulationScenario", arrivals: list[Any], recording: "RecordedTraffic") -> dict[str, Any]:
    """Run a checked scenario; returns the document of its result. Raises ScenarioError for too many requests."""
    from tierlane_tools.simulate.run import RequestSimulation
    from tierlane_tools.simulate.scenario import MAX_REQUESTS, SMALLER, ScenarioError

    offered = round(scenario.offered()) + len(arrivals)
    if offered > MAX_REQUESTS:
        raise ScenarioError(
            f"the scenario: has {offered:,} requests, and at most {MAX_REQUESTS:,} can be simulated; reduce duration_s, or {SMALLER}."
        )
    figures = RequestSimulation(scenario, arrivals).run()
    result = {"seed": scenario.seed, **figures.document(scenario.warmup_s, scenario.ends_s)}
    if recording.shown:
        result["recorded"] = recording.shown
    if recording.notes:
        result["notes"] = recording.notes
    return result
