"""Answers against audit rows, id by id; and CPU readings against each other."""

import pytest

from tierlane.bench.resources import ProcessCpu, cpu_between
from tierlane.bench.verification import Fate, compare, key_id

C, F, U, R = Fate.COMPLETED, Fate.FAILED, Fate.UNCLEAR, Fate.REFUSED


@pytest.mark.parametrize(
    ("fates", "rows", "fault"),
    [
        ({}, [], None),
        ({"a": C, "b": F, "c": R}, [("a", "completed"), ("b", "failed")], None),
        ({"a": U}, [], None),
        ({"a": U}, [("a", "failed")], None),
        ({"a": C}, [], "missing"),
        ({"a": F}, [], "missing"),
        ({"a": C}, [("a", "completed"), ("a", "completed")], "duplicated"),
        ({"a": C}, [("a", "failed")], "wrong_status"),
        ({"a": C}, [("a", "processing")], "wrong_status"),
        ({"a": F}, [("a", "completed")], "wrong_status"),
        ({"a": R}, [("a", "completed")], "refused"),
    ],
)
def test_rows_against_answers(fates: dict[str, Fate], rows: list[tuple[str, str]], fault: str | None) -> None:
    """Exactly one row in the right state for each accepted request, none for a refused one."""
    result = compare(fates, rows)
    counts = {name: getattr(result, name) for name in ("missing", "duplicated", "wrong_status", "refused")}

    assert counts == {name: int(name == fault) for name in counts}
    assert result.ok is (fault is None)


def test_equal_counts_do_not_hide_a_wrong_row() -> None:
    """One row too few beside one too many is seen, because ids are compared and not numbers."""
    result = compare({"a": C, "b": C}, [("a", "completed"), ("x", "completed")])

    assert (result.expected, result.rows, result.missing, result.unexplained) == (2, 2, 1, 1)
    assert not result.ok


@pytest.mark.parametrize(("key", "public"), [("tl_abc123_secret", "abc123"), ("other", ""), ("a_b", "")])
def test_the_public_part_of_a_key(key: str, public: str) -> None:
    """Only what the audit stores is used in a query."""
    assert key_id(key) == public


def cpu(name: str, pid: int, started: float, seconds: float, role: str = "gateway") -> ProcessCpu:
    return ProcessCpu(role, name, pid, started, seconds)


@pytest.mark.parametrize(
    ("before", "after", "by_role", "incomplete"),
    [
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 1, 5, 12)], {"gateway": 2.0}, ()),
        ([cpu("g1", 1, 5, 1), cpu("g2", 2, 5, 1)], [cpu("g1", 1, 5, 2), cpu("g2", 2, 5, 3)], {"gateway": 3.0}, ()),
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 9, 50, 3)], {"gateway": 3.0}, ("g1",)),
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 1, 50, 3)], {"gateway": 3.0}, ("g1",)),
        ([cpu("g1", 1, 5, 10)], [], {}, ("g1",)),
        ([], [cpu("m1", 3, 50, 4, "model")], {"model": 4.0}, ("m1",)),
        ([cpu("g1", 1, 5, 10)], [cpu("g1", 1, 5, 9.99)], {"gateway": 0.0}, ()),
    ],
)
def test_cpu_between_readings(
    before: list[ProcessCpu], after: list[ProcessCpu], by_role: dict[str, float], incomplete: tuple[str, ...]
) -> None:
    """Differences by role; a process that was replaced counts from its beginning and is named."""
    use = cpu_between(before, after)

    assert (use.by_role, use.incomplete) == (by_role, incomplete)
