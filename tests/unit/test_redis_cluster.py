"""Clusters: their URLs, the reply to CLUSTER SLOTS, and names that are all in one slot."""

from typing import Any

import pytest
from redis.crc import key_slot
from redis.exceptions import ConnectionError  # noqa: A004 - as everywhere in redis-py

from scheduler.errors import StartError
from scheduler.redis_client.cluster import ClusterUrl, as_cluster, parse, primary_of
from scheduler.redis_client.keys import DEFAULT_CELL, Keys, hash_tag
from tierlane_local.embedded.cluster import NodeView, awaits_failover, parse_nodes, slot_ranges

SLOT = key_slot(hash_tag(DEFAULT_CELL).encode())

URL = "redis+cluster://"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+cluster://a", ClusterUrl([("a", 6379)], {}, False, {})),
        ("redis+cluster://a:1,b:2/0", ClusterUrl([("a", 1), ("b", 2)], {}, False, {})),
        ("redis+cluster://[::1]:1", ClusterUrl([("::1", 1)], {}, False, {})),
        (
            "rediss+cluster://user:p%40ss@a:1/?ssl_ca_certs=/ca.crt",
            ClusterUrl([("a", 1)], {"username": "user", "password": "p@ss"}, True, {"ssl_ca_certs": "/ca.crt"}),
        ),
    ],
)
def test_urls(url: str, expected: ClusterUrl) -> None:
    """Hosts with ports, credentials, and the files of TLS."""
    assert parse(url) == expected


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("redis+cluster://a/1", "database '1'"),
        ("redis+cluster://a:x", "'a:x'"),
        ("redis+cluster://", "''"),
        ("redis+cluster://a?ssl_ca_certs=x", "'ssl_ca_certs'"),
        ("rediss+cluster://a?timeout=1", "'timeout'"),
    ],
)
def test_a_wrong_url_is_rejected_with_its_fault(url: str, fault: str) -> None:
    """The error names the wrong part."""
    with pytest.raises(StartError, match=fault):
        parse(url)


def test_the_scheme_of_a_cluster_is_added() -> None:
    """To URLs of TCP only: the servers of a cluster find each other by addresses."""
    assert as_cluster("rediss://user:x@a:1?ssl_ca_certs=/f") == "rediss+cluster://user:x@a:1?ssl_ca_certs=/f"
    with pytest.raises(StartError, match="unix"):
        as_cluster("unix:///run/redis.sock")


ASKED = ("10.0.0.1", 7000)


@pytest.mark.parametrize(
    ("ranges", "primary"),
    [
        ([[0, 16383, [b"10.0.0.2", 7001, b"id"]]], ("10.0.0.2", 7001)),
        ([[0, 16383, [b"", 7001, b"id"], [b"10.0.0.3", 7002, b"id"]]], ("10.0.0.1", 7001)),
        ([[0, 16383, [None, 7001, b"id", [b"hostname", b"x"]]]], ("10.0.0.1", 7001)),
        ([[0, SLOT - 1, [b"a", 1, b"id"]], [SLOT, SLOT, [b"b", 2, b"id"]], [SLOT + 1, 16383, [b"c", 3]]], ("b", 2)),
    ],
)
def test_the_primary_of_the_slot(ranges: list[Any], primary: tuple[str, int]) -> None:
    """A server without a host has that of the server that was asked."""
    found, nodes = primary_of(SLOT, ranges, ASKED)

    assert found == primary
    assert primary in nodes
    assert len(nodes) == sum(len(each) - 2 for each in ranges)


@pytest.mark.parametrize("ranges", [[], [[0, SLOT - 1, [b"a", 1, b"id"]]], [[0, 16383]]])
def test_a_slot_without_a_primary(ranges: list[Any]) -> None:
    """It counts as a server that does not respond."""
    with pytest.raises(ConnectionError):
        primary_of(SLOT, ranges, ASKED)


@pytest.mark.parametrize("pool", ["default", "other"])
def test_all_names_on_a_cluster_are_in_one_slot(pool: str) -> None:
    """Those of a pool, and those that pools share; on other servers the names have no tag."""
    keys, plain = Keys.at(URL, pool), Keys.at("redis://a", pool)
    fixed = {
        name: value for name, value in vars(keys).items() if isinstance(value, str) and name not in ("pool", "tag")
    }
    names = [*fixed.values(), keys.queue("free"), keys.request("r"), keys.backlog("free", "{c}"), keys.gpu("{w}")]

    assert {key_slot(name.encode()) for name in names} == {SLOT}
    assert all(value == keys.tag + getattr(plain, name) for name, value in fixed.items())


@pytest.mark.parametrize("primaries", [3, 5, 16])
def test_slots_are_divided(primaries: int) -> None:
    """Each slot belongs to one primary."""
    ranges = slot_ranges(primaries)

    assert [slot for first, last in ranges for slot in range(first, last + 1)] == list(range(16384))
    assert len(ranges) == primaries


def test_what_a_server_sees() -> None:
    """Of CLUSTER NODES: address, flags, primary, epoch, and the slots, but not those that move."""
    text = (
        "aa 127.0.0.1:7001@17001,host myself,master - 0 0 7 connected 0-5 9 [9->-bb]\n"
        "bb 127.0.0.1:7002@17002 slave,fail? aa 0 1 7 disconnected\n"
    )

    assert parse_nodes(text) == [
        NodeView("aa", 7001, frozenset({"myself", "master"}), "-", 7, ((0, 5), (9, 9))),
        NodeView("bb", 7002, frozenset({"slave", "fail?"}), "aa", 7, ()),
    ]


@pytest.mark.parametrize(
    ("lost", "replica", "expected"),
    [
        ("master 0-5", "slave aa", True),
        ("master,fail 0-5", "slave aa", True),
        ("master,fail 0-5", "slave,fail aa", False),  # Nobody can take over.
        ("master,fail 0-5", "slave cc", False),
        ("master,fail", "master -", False),  # The replica has.
        ("slave,fail", "master -", False),
    ],
)
def test_a_failover_is_awaited(lost: str, replica: str, expected: bool) -> None:
    """While the lost server has slots that a replica of it can take."""
    flags, _, slots = lost.partition(" ")
    other, _, primary = replica.partition(" ")
    nodes = parse_nodes(
        f"aa 127.0.0.1:1@2 {flags} - 0 0 1 disconnected {slots}\nbb 127.0.0.1:3@4 {other} {primary} 0 0 1 connected"
    )

    assert awaits_failover(nodes, "aa") is expected
