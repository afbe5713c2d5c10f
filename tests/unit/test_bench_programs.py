"""The case with the field's load programs: what is compared, the table, and how a program is run."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cases.programs import PROGRAMS, SHOWN, judge, notes, table, write_tokenizer
from programs.catalogue import Installed
from transformers import AutoTokenizer


def data(rates: tuple[float, float], first_ms: tuple[float | None, float | None], failures: int = 0) -> dict[str, Any]:
    """The data of a run in which one program has figures and all others cannot be installed."""
    name, *others = [program.name for program in PROGRAMS]
    sides = {
        side: [
            {"tokens_per_s": rate, "first_p50_ms": first, "first_p99_ms": first, "answers": 4, "failures": failures}
            for _ in range(2)
        ]
        for side, rate, first in zip(("direct", "tierlane"), rates, first_ms, strict=True)
    }
    return {"runs": {name: sides}, "failed": dict.fromkeys(others, "needs python3.99")}


@pytest.mark.parametrize(
    ("given", "missed"),
    [
        (data((1000.0, 971.0), (20.0, 29.0)), []),
        (
            data((1000.0, 969.0), (20.0, 31.0), failures=1),
            ["tokens/s of direct", "first token p50 later by", "failures"],
        ),
        (data((1000.0, 980.0), (None, None)), []),
    ],
)
def test_the_targets(given: dict[str, Any], missed: list[str]) -> None:
    """Tokens/s within 3 % of direct, the first token 10 ms later at most, no failure."""
    found = [check for check in judge(given) if check.holds is False]
    assert [check.figure.partition(": ")[2] for check in found] == missed


def test_the_table_has_the_reason_where_a_program_has_no_figures() -> None:
    """The counts of all rounds are added up."""
    lines = table(data((1000.0, 980.0), (20.0, 25.0), failures=1)).splitlines()[2:]
    assert [line.count("|") for line in lines] == [8] * len(PROGRAMS)
    assert "| 1,000 | 980 | 20, 20 ms | 25, 25 ms | 2 of 10, 2 of 10 |" in lines[0]
    assert all("needs python3.99" in line for line in lines[1:])


def test_the_page_has_the_command_of_each_program() -> None:
    """With placeholders for address and key."""
    (_, block) = notes()
    commands = block.splitlines()[1 : 1 + len(PROGRAMS)]
    assert all(SHOWN.url in line for line in commands if not line.startswith("inference-perf"))
    assert f'"base_url": "{SHOWN.url}"' in block


def test_a_program_that_fails(tmp_path: Path) -> None:
    """The error has the end of its output."""
    with pytest.raises(RuntimeError, match="ended with 3: no such model"):
        Installed(Path(sys.executable), {}).run(
            ["python", "-c", "import sys; print('no such model'); sys.exit(3)"], {}, tmp_path, 30.0
        )


def test_a_token_is_a_character(tmp_path: Path) -> None:
    """So that prompts made of random tokens have the same number of tokens when they are read again."""
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Once upon a time,\n12 words"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
