"""The load programs of the field before an engine with continuous batching, directly and through Tierlane, by turns."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases.continuous_setup import Plan, direct, medians, run_side, stack_before, through, wait_until_idle
from cases.outcome import Check, Outcome, at_least, at_most, none_of, over
from chat_load.generator import Span
from chat_load.plan import Load
from engine.process import RunningEngine, running_engine
from peers.catalogue import InstallError
from programs.catalogue import FAULTS, PROGRAMS, PROMPT_TOKENS, STREAMS, TOKENS, Call, Installed, Program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path("build/programs")
"""Of the installed programs."""
LIMIT_S = 300.0
"""Of one run of a program."""
REQUESTS, ROUNDS = 192, 2
QUICK_REQUESTS, QUICK_ROUNDS = 48, 1
WARM_S = 6.0
END = "</s>"
"""A token that no text has."""
LEAST_OF_DIRECT, MOST_LATER_MS = 97.0, 10.0
SHOWN = Call("http://127.0.0.1:8080", "KEY", ".", REQUESTS, "NAME")
"""What the commands on the page have."""


def run(*, quick: bool) -> Outcome:
    """Run every program that can be installed; others have a row with the reason."""
    installed: dict[str, Installed] = {}
    failed: dict[str, str] = {}
    for program in PROGRAMS:
        try:
            installed[program.name] = program.install(FOLDER / program.name)
        except InstallError as error:
            failed[program.name] = str(error)
    wanted = [program for program in PROGRAMS if program.name in installed]
    requests, rounds = (QUICK_REQUESTS, QUICK_ROUNDS) if quick else (REQUESTS, ROUNDS)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {program.name: {} for program in wanted}
    with running_engine() as engine, stack_before(engine, Plan(), 1) as stack:
        sides = (direct(engine), through(stack))
        run_side(sides[1], engine, [Load(clients=STREAMS, stream=True, tokens=TOKENS)], Span(0.0, WARM_S))
        for _ in range(rounds):
            for program in [each for each in wanted if each.name not in failed]:
                for side in sides:
                    call = Call(side.url.removesuffix("/v1"), side.key or "none", "", requests)
                    try:
                        found = _figures(program, installed[program.name], call, engine)
                    except FAULTS as error:
                        failed[program.name] = str(error) or type(error).__name__
                        break
                    runs[program.name].setdefault(side.name, []).append(found)
    data = {"runs": runs, "failed": failed, "requests": requests}
    return Outcome(judge(data), data | {"table": table(data)}, notes())


def _figures(program: Program, installed: Installed, call: Call, engine: RunningEngine) -> dict[str, Any]:
    """One run in an empty folder. Tokens/s of a program that does not report them are the engine's while it was busy."""
    with tempfile.TemporaryDirectory(prefix="tierlane-program-") as folder:
        call = call._replace(folder=folder)
        write_tokenizer(Path(call.tokenizer))
        for name, text in program.files(call).items():
            (Path(folder) / name).write_text(text, "utf-8")
        began_s = engine.state()["now_s"]
        installed.run(program.words(call), program.environment(call), Path(folder), LIMIT_S)
        found = program.figures(Path(folder))._asdict()
    wait_until_idle(engine)
    if found["tokens_per_s"] is None:
        busy = [sample for sample in engine.history(began_s) if sample.running]
        tokens = busy[-1].generated_tokens - busy[0].generated_tokens
        found["tokens_per_s"] = tokens / (busy[-1].at_s - busy[0].at_s)
    return found


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are the printable characters, for programs that make prompts of a number of tokens."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [alphabet.pre_tokenize_str(chr(code))[0][0] for code in (10, *range(32, 127))]
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate([END, *characters])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = alphabet, decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    whole.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    whole.save_pretrained(folder)


def _sides(data: Mapping[str, Any], program: Program) -> list[dict[str, Any]]:
    """Medians over the rounds, direct and through Tierlane; requests are added up."""
    found = []
    for side in ("direct", "tierlane"):
        several = data["runs"][program.name][side]
        counts = {name: sum(each[name] for each in several) for name in ("answers", "failures")}
        found.append(medians(several) | counts)
    return found


def judge(data: Mapping[str, Any]) -> list[Check]:
    """Compare each program's figures through Tierlane with those of the engine alone."""
    checks = []
    for program in PROGRAMS:
        if program.name in data["failed"]:
            checks.append(Check(f"{program.title}: tokens/s", "", data["failed"][program.name]))
            continue
        alone, ours = _sides(data, program)
        share = over(ours["tokens_per_s"], alone["tokens_per_s"])
        checks.append(at_least(f"{program.title}: tokens/s of direct", share and share * 100, LEAST_OF_DIRECT, " %", 1))
        if alone["first_p50_ms"] is not None:
            later_ms = ours["first_p50_ms"] - alone["first_p50_ms"]
            checks.append(at_most(f"{program.title}: first token p50 later by", later_ms, MOST_LATER_MS, " ms", 1))
        checks.append(none_of(f"{program.title}: failures", ours["failures"] + alone["failures"]))
    return checks


def table(data: Mapping[str, Any]) -> str:
    """The figures side by side, in Markdown."""
    heads = [
        "Program",
        "API",
        "tokens/s direct",
        "through Tierlane",
        "first token p50, p99 direct",
        "through Tierlane",
        "failures",
    ]
    rows: list[Sequence[str]] = [heads, ["---", "---", *["---:"] * (len(heads) - 2)]]
    for program in PROGRAMS:
        if program.name in data["failed"]:
            rows.append([program.title, program.api, data["failed"][program.name], *["-"] * (len(heads) - 3)])
            continue
        sides = _sides(data, program)
        rates = [f"{side['tokens_per_s']:,.0f}" for side in sides]
        errors = [f"{side['failures']:,} of {side['failures'] + side['answers']:,}" for side in sides]
        rows.append([program.title, program.api, *rates, *map(_first, sides), ", ".join(errors)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _first(side: Mapping[str, Any]) -> str:
    if side["first_p50_ms"] is None:
        return "not reported"
    return f"{side['first_p50_ms']:,.0f}, {side['first_p99_ms']:,.0f} ms"


def notes() -> list[str]:
    """What was run, and the command of each program."""
    config = next(program for program in PROGRAMS if program.name == "inference_perf").files(SHOWN)
    lines = "\n".join(
        [*(program.command(SHOWN) for program in PROGRAMS), "", *map("# {0[0]}: {0[1]}".format, config.items())]
    )
    about = (
        f"{STREAMS} requests at a time, of {PROMPT_TOKENS} tokens each and {TOKENS} of the answer, to the stand-in for an engine with "
        "continuous batching (`tools/bench/engine/`), directly and through Tierlane by turns. The figures are the programs' own, "
        "but tokens/s of lm_eval, which are the engine's. Failures: direct, through Tierlane. `make programs` installs the "
        "programs and runs each like this, with the files that `tools/bench/programs/catalogue.py` writes:"
    )
    return [about, f"```text\n{lines}\n```"]
