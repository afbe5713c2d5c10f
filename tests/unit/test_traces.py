"""Traces: each format from a sample, the faults that real files have, and how a replay chooses, scales and splits."""

import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tierlane.command import OptionReader, Tool
from tierlane_tools.bench.plan.mix import Mix
from tierlane_tools.traces.formats import FORMATS, read_requests
from tierlane_tools.traces.options import OPTIONS
from tierlane_tools.traces.plan import TraceOptions, read_trace_options
from tierlane_tools.traces.replay import ReplayedRequest, TraceReplay
from tierlane_tools.traces.request import TraceError, TraceRequest
from tierlane_tools.traces.samples import SampleRequest, sample_requests, write_samples

SECONDS, RATE = 60.0, 20.0
SAMPLE = sample_requests(SECONDS, RATE)
RESOLUTION_S = {"burstgpt": 1.0, "mooncake": 0.001}
"""Of the times of a format; others have microseconds."""
MIX = Mix(("enterprise", "paid", "free"), (0.1, 0.3, 0.6))

BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, Path]:
    return write_samples(tmp_path, SAMPLE)


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def replayed(options: TraceOptions) -> list[ReplayedRequest]:
    return TraceReplay(options).sorted_requests()


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_each_format_is_recognised_and_read(name: str, samples: dict[str, Path]) -> None:
    """Times, lengths and failures are those of the file, within the resolution of the format."""
    found = list(read_requests(samples[name]))
    expected = SAMPLE if any(each.failed for each in found) else [each for each in SAMPLE if not each.failed]

    assert len(found) == len(expected)
    base_s = 0.0 if name in RESOLUTION_S else expected[0].at_s
    for read, made in zip(found, expected, strict=True):
        assert abs(read.at_s - found[0].at_s * (base_s > 0) - (made.at_s - base_s)) <= RESOLUTION_S.get(name, 2e-6)
        assert read.failed == made.failed
        if not read.failed:
            assert read.output_tokens == made.written
        assert read.input_tokens == (1 if name == "arrivals" else made.read)


def test_both_releases_of_burstgpt_are_read(tmp_path: Path) -> None:
    """Release 1.2 has two more columns in the middle, and no session for calls of the API; its clock begins in the past."""
    old = list(read_requests(written(tmp_path, BURST_1 + "5,ChatGPT,472,18,490,Conversation log\n")))
    new = list(
        read_requests(
            written(
                tmp_path,
                BURST_3
                + "19440110.0,aa-1,43,GPT-4,906,446,1352,Conversation log\n19440192.0,,2,ChatGPT,36,0,36,API log\n",
            )
        )
    )

    assert old == [TraceRequest(5.0, 472, 18, model="ChatGPT", kind="Conversation log")]
    assert new == [
        TraceRequest(19440110.0, 906, 446, "aa-1", model="GPT-4", kind="Conversation log"),
        TraceRequest(19440192.0, 36, 0, model="ChatGPT", kind="API log", failed=True),
    ]


def test_both_releases_of_azure_are_read(tmp_path: Path) -> None:
    """2023 has seven digits and no offset, 2024 an offset, and no fraction at a whole second; the last line may have no end."""
    lines = AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8"
    assert list(read_requests(written(tmp_path, lines))) == [
        TraceRequest(0.0, 4808, 10),
        TraceRequest(0.052, 3180, 8),
    ]
    lines = AZURE + "2024-05-10 00:00:09.750000+00:00,5,6\r\n2024-05-10 00:00:10+00:00,7,8\r\n"
    assert [each.at_s for each in read_requests(written(tmp_path, lines))] == [0.0, 0.25]


def test_a_mark_at_the_start_and_other_line_ends_are_accepted(tmp_path: Path) -> None:
    """As Windows writes files."""
    lines = "\ufeff" + (BURST_1 + "5,ChatGPT,4,1,5,API log\n").replace("\n", "\r\n")
    assert [each.input_tokens for each in read_requests(written(tmp_path, lines))] == [4]


def test_a_request_of_vllm_arrived_before_it_waited_for_a_connection(tmp_path: Path) -> None:
    """With `--max-concurrency` the sending of a request says nothing of its arrival."""
    text = (
        '{"num_prompts": 2, "request_rate": 5.0, "input_lens": [3, 4], "output_lens": [5, 6], '
        '"start_times": [10.0, 12.0], "queue_times": [0.0, 1.5], "errors": ["", ""]}'
    )
    assert [each.at_s for each in read_requests(written(tmp_path, text))] == [10.0, 10.5]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty."),
        ("\r\n \n", "is empty."),
        (
            "a,b\n1,2\n",
            "the format of PATH is not known; it must be one of burstgpt, azure, audit, arrivals, mooncake, vllm",
        ),
        (BURST_1 + "5,ChatGPT,472,18,490,API log\n6,ChatGPT,4", "line 3 of PATH has 3 of 6 columns."),
        (BURST_1 + "5,ChatGPT,4x,18,490,API log\n", "line 2 of PATH needs a number in Request tokens, got '4x'."),
        (
            BURST_1 + "5,ChatGPT,-4,18,490,API log\n",
            "line 2 of PATH needs a number of tokens in Request tokens, got '-4'.",
        ),
        (BURST_1 + "nan,ChatGPT,4,18,490,API log\n", "line 2 of PATH needs a number in Timestamp, got 'nan'."),
        (AZURE + "yesterday,4,5\r\n", "line 2 of PATH needs a date and time in TIMESTAMP, got 'yesterday'."),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 3, "inp',
            "line 2 of PATH cannot be read",
        ),
        (
            '{"timestamp": 0, "input_length": 5}\n',
            "line 1 of PATH cannot be read: Object missing required field `output_length`",
        ),
        ('{"timestamp": 0, "input_length": -5, "output_length": 1}\n', "line 1 of PATH has a length below 0."),
        (
            '{"num_prompts": 1, "request_rate": 1}',
            "PATH has no start_times of single requests; write it with --save-detailed.",
        ),
        ('{"num_prompts": 1, "request_rate": 1}\n{}', "--append-result writes several."),
        (BURST_1 + "5,ChatGPT,472,0,472,API log\n", "PATH has no answered request."),
    ],
)
def test_faults_are_refused_with_the_line(text: str, sentence: str, tmp_path: Path) -> None:
    """The sentence says where and what."""
    path = written(tmp_path, text)
    with pytest.raises(TraceError) as refused:
        replayed(TraceOptions(path))

    assert sentence.replace("PATH", str(path)) in str(refused.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    """Traces are published compressed, too."""
    (tmp_path / "trace.csv.gz").write_bytes(b"\x1f\x8b\xff\xff")
    with pytest.raises(TraceError, match="uncompress it first"):
        list(read_requests(tmp_path / "trace.csv.gz"))
    with pytest.raises(TraceError, match="No such file"):
        list(read_requests(tmp_path / "nowhere"))


def test_a_named_format_must_be_that_of_the_file(samples: dict[str, Path]) -> None:
    """The first line decides, not its ending."""
    with pytest.raises(
        TraceError, match="is no azure: its first line must have ContextTokens, GeneratedTokens, TIMESTAMP"
    ):
        list(read_requests(samples["burstgpt"], "azure"))
    assert list(read_requests(samples["azure"], "azure"))


def test_lines_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    """The replay begins with the earliest request, wherever it is in the file."""
    rows = "".join(f"{at},ChatGPT,{at},7,1,API log\n" for at in (20, 5, 10, 30))
    replay = TraceReplay(TraceOptions(written(tmp_path, BURST_1 + rows)))

    assert [(each.at_s, each.input_tokens) for each in replay.sorted_requests()] == [
        (0, 5),
        (5, 10),
        (15, 20),
        (25, 30),
    ]
    assert replay.notes["trace"] == "4 read, 2 not in order of time"


def test_requests_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    """Their answers have no length. A prompt of no tokens, which no server accepts, has one."""
    rows = "5,ChatGPT,472,0,472,API log\n6,ChatGPT,0,7,7,API log\n7,ChatGPT,0,0,0,API log\n8,ChatGPT,4,1,5,API log\n"
    replay = TraceReplay(TraceOptions(written(tmp_path, BURST_1 + rows)))

    assert [(each.at_s, each.input_tokens, each.output_tokens) for each in replay.sorted_requests()] == [
        (0, 1, 7),
        (2, 4, 1),
    ]
    assert replay.notes["trace"] == "4 read, 2 without an answer, 1 without a prompt"


def test_a_part_of_the_time_and_its_speed(samples: dict[str, Path]) -> None:
    """The clock of the options is that of the file; the replay begins with the part, at its own speed."""
    options = TraceOptions(samples["mooncake"], from_s=10.0, to_s=30.0, speed=4.0)
    whole = list(read_requests(options.path))
    part = [each.at_s for each in whole if 10 <= each.at_s - whole[0].at_s < 30]
    replay = TraceReplay(options)

    found = replay.sorted_requests()
    assert [each.at_s for each in found] == pytest.approx([(at - whole[0].at_s - 10) / 4 for at in part], abs=1e-9)
    assert replay.ends_s == pytest.approx(5.0, abs=0.01)


def test_coarse_times_are_spread(samples: dict[str, Path]) -> None:
    """Each within the resolution of the file."""
    whole = replayed(TraceOptions(samples["burstgpt"]))
    spread = replayed(TraceOptions(samples["burstgpt"], spread_s=1.0))

    assert len({each.at_s for each in whole}) <= SECONDS
    assert len({each.at_s for each in spread}) == len(spread) == len(whole)
    assert Counter(int(each.at_s) for each in spread) == Counter(int(each.at_s) for each in whole)


@pytest.mark.parametrize("rate", [2.0, 8.0, 47.0])
@pytest.mark.parametrize("name", ["azure", "burstgpt"])
def test_the_rate_is_that_of_the_option(rate: float, name: str, samples: dict[str, Path]) -> None:
    """Less by leaving out whole sessions, more by copies of them; the same seed gives the same replay."""
    options = TraceOptions(samples[name], rate=rate)
    replay = TraceReplay(options)
    found = replay.sorted_requests()

    assert len(found) / replay.ends_s == pytest.approx(rate, rel=0.35)
    assert found == replayed(options)
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert found[-1].at_s < replay.ends_s
    whole = Counter(each.session for each in replayed(TraceOptions(samples[name])))
    for session, count in Counter(each.session for each in found if each.session).items():
        assert count <= whole[session.split("/")[0]]


def test_copies_are_sessions_of_their_own_with_their_own_prompts(samples: dict[str, Path]) -> None:
    """So they hit no cache that the original request would not hit, and are not sent at the same time."""
    found = replayed(TraceOptions(samples["mooncake"], rate=3 * RATE))

    of_first = [each for each in found if each.blocks and each.blocks[0] == 0]
    assert 0 < len(of_first) < len(found) / 2
    assert len({each.at_s for each in found}) > 0.9 * len(found)


def test_the_mix_is_drawn_by_session(samples: dict[str, Path]) -> None:
    """A session stays with one customer of one tier; requests without a session are drawn each."""
    found = replayed(TraceOptions(samples["burstgpt"], mix=MIX))
    places = {each.session: (each.tier, each.share) for each in found if each.session}

    assert all(places[each.session] == (each.tier, each.share) for each in found if each.session)
    counted = Counter(each.tier for each in found if not each.session)
    for tier, share in enumerate(MIX.shares):
        assert counted[tier] / counted.total() == pytest.approx(share, abs=0.06)


def test_a_rule_and_the_file_choose_the_tier(samples: dict[str, Path]) -> None:
    """Before the mix: the rule, then the tier that the audit has."""
    by_model = replayed(TraceOptions(samples["burstgpt"], mix=MIX, by=("model", {"GPT-4": 0, "ChatGPT": 2})))
    of_audit = replayed(TraceOptions(samples["audit"], mix=MIX))

    assert {each.tier for each in by_model} == {0, 2}
    assert {(each.customer == "customer-0", each.tier) for each in of_audit} == {(True, 2), (False, 1)}


def test_lengths_have_a_limit(samples: dict[str, Path]) -> None:
    """For a model with a short context."""
    found = replayed(TraceOptions(samples["azure"], max_input=100, max_output=20))

    assert max(each.input_tokens for each in found) == 100
    assert max(each.output_tokens for each in found) == 20


class WrongOption(Exception):
    """Of these tests."""


def options_of(**given: str) -> TraceOptions | None:
    return read_trace_options(OptionReader(Tool("bench", OPTIONS), given, WrongOption), MIX, 1)


def test_options_are_read() -> None:
    """Without a file there is no trace; a rule may name a tier that the mix does not have."""
    found = options_of(trace="a.csv", trace_from="5", trace_by="model:GPT-4=gold,ChatGPT=free", max_output_tokens="9")

    assert options_of(trace_from="5") is None
    assert found is not None
    assert (found.path, found.from_s, found.to_s, found.rate) == (Path("a.csv"), 5.0, math.inf, None)
    assert found.by == ("model", {"GPT-4": 3, "ChatGPT": 2})
    assert found.mix == Mix((*MIX.tiers, "gold"), (*MIX.shares, 0.0))
    assert found.max_output == 9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trace_format", "parquet"),
        ("trace_from", "x"),
        ("trace_to", "0"),
        ("trace_speed", "0"),
        ("trace_rate", "-1"),
        ("trace_by", "model"),
        ("trace_by", "colour:red=free"),
        ("max_input_tokens", "0"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: str) -> None:
    """With its flag."""
    with pytest.raises(WrongOption, match="--" + option.replace("_", "-")):
        options_of(**{"trace": "a.csv", "trace_from": "3", option: value})


def test_any_cut_and_any_changed_character_is_read_or_refused(tmp_path: Path, samples: dict[str, Path]) -> None:
    """No file ends in another error than the one with a sentence."""
    random = Random(5)
    for path in samples.values():
        text = path.read_text("utf-8")[:3000]
        for _ in range(60):
            at = random.randrange(len(text))
            broken = text[:at] + random.choice(("", "x", ",", "\n", '"', "-", "e9", "\x00")) + text[at + 1 :]
            with suppress(TraceError):
                replayed(replace(TraceOptions(written(tmp_path, broken)), mix=MIX))


def test_sessions_of_the_sample() -> None:
    """The sample has what the formats can express."""
    assert any(each.failed for each in SAMPLE)
    assert len({each.session for each in SAMPLE}) > 30
    assert isinstance(SAMPLE[0], SampleRequest)
