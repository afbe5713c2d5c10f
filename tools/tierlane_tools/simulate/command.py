"""The command `tierlane simulate`: its argument and options. The rest is imported when it runs."""
# ruff: noqa: PLC0415 - see above

import asyncio
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tierlane.command import (
    Config,
    DataDir,
    HelpOption,
    Pool,
    Tool,
    Verb,
    VerbCommand,
    carry_out,
    option,
    parameters,
    run_group,
    set_options,
    single_verb,
    with_example,
)
from tierlane.settings.declaration import Option
from tierlane_tools.traces.options import MIX, OPTIONS

if TYPE_CHECKING:
    from tierlane.settings.model import Settings
    from tierlane_tools.simulate.recorded import RecordedTraffic
    from tierlane_tools.simulate.scenario import SimulationScenario

app = single_verb()
TOOL = Tool(
    "simulate",
    {
        **OPTIONS,
        "mix": Option(MIX, "Share of each tier of the requests of a trace.", "MIX"),
        "trace_customers": Option(
            "10", "Customers of each tier of a trace that the scenario has none of.", "N", 1, 100_000
        ),
        "slo": Option(
            "",
            "Find the fewest GPUs that meet these objectives, such as paid.first_token_p95=500ms,all.success=99%.",
            "LIST",
        ),
    },
)

EXAMPLE = (
    "simulate scenario.yaml --json result.json\nsimulate --from 2026-11-20 --to 2026-11-21 --gpus 6\n"
    "simulate --trace trace.csv --slo paid.first_token_p95=500ms"
)


class _CommandLine(NamedTuple):
    """What the command line asks for. `times`: of recorded requests; `given`: the options of TOOL; `changes`: of `--set`."""

    scenario: Path | None
    times: tuple[str | None, str | None]
    given: dict[str, str | None]
    changes: list[str]
    json: Path | None
    plots: Path | None


def main(argv: list[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    return run_group(app, "simulate", argv)


def simulate(
    *,
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="SCENARIO", help="Scenario in YAML; optional with --from and --to or --trace."),
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
    **given: Any,
) -> None:
    """Simulate a scenario, a trace, or recorded requests with other limits, tiers or GPUs, in virtual time."""
    fields = [*(changes or []), *([f"gpus={gpus}"] if gpus else []), *([f"seed={seed}"] if seed else [])]

    def prepare() -> Verb:
        return lambda settings: _run(settings, _CommandLine(scenario, (first, last), given, fields, json, plots))

    carry_out(prepare, config, database=False, data_dir=data_dir, pool=pool)


def _add_command() -> None:
    """Add the command with the options of TOOL."""
    *named, help_, _ = inspect.signature(simulate).parameters.values()
    set_options(simulate, [*named, *parameters(TOOL.options, TOOL.variable, reads=True), help_])
    # An own help option, because typer imports pydantic to check the built-in one.
    add = app.command(
        epilog=with_example(EXAMPLE, "Exit codes: 0 done, 1 failed or objectives not met, 2 wrong usage or scenario."),
        cls=VerbCommand,
        add_help_option=False,
    )
    add(simulate)


_add_command()


def _run(settings: "Settings", asked: _CommandLine) -> int:
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
    from tierlane_tools.simulate.traces import trace_arrivals, trace_base, trace_replay

    if asked.plots:
        require_plots()
    path, given = asked.scenario, asked.given
    document = read_document(path) if path else {}
    recording = _recorded(settings, *asked.times)
    replay = trace_replay(given, with_settings(document, asked.changes).get("seed", 1))
    if recording and replay:
        raise ScenarioError("--trace: cannot be used with --from and --to; name either a file or recorded requests.")
    base = trace_base(replay, document, given) if replay else recording.base if recording else DEFAULTS
    if recording is None and replay is None and path is None:
        raise ScenarioError(
            "SCENARIO: is missing; name a file, a trace with --trace, or recorded requests with --from and --to."
        )
    complete = with_settings(merged(base, document), asked.changes)
    scenario = scenario_from(complete)
    arrivals = numbered(recording, scenario) if recording else []
    if replay:
        arrivals = trace_arrivals(replay, scenario)
        recording = RecordedTraffic(notes=replay.notes)
    if scenario.arrivals:
        folder = path.parent if path else Path()
        arrivals = sorted([*arrivals, *from_file(folder / scenario.arrivals, scenario)])
    if given.get("slo"):
        return _size(asked, complete, arrivals, recording or RecordedTraffic())
    result = run_scenario(scenario, arrivals, recording or RecordedTraffic())
    show(result)
    if asked.json:
        write_json(asked.json, result)
    if asked.plots:
        draw(asked.plots, result)
    return 0


def _size(asked: _CommandLine, document: dict[str, Any], arrivals: list[Any], recording: "RecordedTraffic") -> int:
    """Find the fewest GPUs, and show the run with them."""
    from tierlane_tools.bench.plan.objectives import SloError, parse_slo
    from tierlane_tools.simulate.report import draw, show, write_json
    from tierlane_tools.simulate.scenario import ScenarioError, scenario_from
    from tierlane_tools.simulate.sizing import Sizer, checked, sentences, show_sizing, sizing_document

    try:
        objectives = checked(parse_slo(asked.given["slo"] or "", list(document["tiers"])))
    except SloError as error:
        raise ScenarioError(f"--slo: {error}.") from None
    sizing = Sizer(document, arrivals, objectives, lambda line: typer.echo(line, err=True)).size()
    result = run_scenario(scenario_from({**document, "gpus": sizing.least.gpus}), arrivals, recording)
    show(result)
    typer.echo()
    show_sizing(sizing)
    typer.echo()
    for sentence in sentences(sizing):
        typer.echo(sentence)
    if asked.json:
        write_json(asked.json, {**result, "sizing": sizing_document(sizing)})
    if asked.plots:
        draw(asked.plots, result)
    return 0 if sizing.least.meets else 1


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
