"""Connections: what one address may have, and who makes room where all are in use."""

import pytest

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import LimitReached, Overloaded
from anabranch.domain.shares import Limit
from anabranch.policies.connections import LOOKED_AT, OpenConnections
from anabranch.policies.limits import connection_limit


class Open:
    def __init__(self, *, idle: bool = True) -> None:
        self.idle = idle
        self.dropped = False

    def is_idle(self) -> bool:
        return self.idle

    def drop(self) -> None:
        self.dropped = True


def connections(each: float = 2, total: float = 100) -> OpenConnections:
    limit = Limit(name="connections", description="connections at once", each=each, total=total, setting="EACH")
    return OpenConnections(limit, lambda address: address.startswith("10."))


def opened(found: OpenConnections, address: str, count: int, *, idle: bool = True) -> list[Open]:
    made = [Open(idle=idle) for _ in range(count)]
    for one in made:
        found.add(address, one)
    return made


def test_an_address_may_have_so_many_connections() -> None:
    found = connections()
    first, _ = opened(found, "203.0.113.7", 2)
    with pytest.raises(LimitReached, match=r"limit of 2 connections at once \(EACH\)"):
        found.add("203.0.113.7", Open())
    found.add("203.0.113.8", Open())
    found.remove("203.0.113.7", first)
    found.add("203.0.113.7", Open())


@pytest.mark.parametrize(("total", "files"), [(0, 16), (8, 1_024)])
def test_an_address_may_have_half_of_all_connections(total: int, files: int) -> None:
    found = OpenConnections(connection_limit(Settings(max_connections=total), files), lambda _: False)
    opened(found, "203.0.113.7", 4, idle=False)
    with pytest.raises(LimitReached, match=r"limit of 4 connections at once \(half of AGGREGATOR_MAX_CONNECTIONS\)"):
        found.add("203.0.113.7", Open())
    opened(found, "203.0.113.8", 4, idle=False)


def test_an_address_without_a_limit_may_have_all_connections() -> None:
    found = OpenConnections(connection_limit(Settings(caller_connections=0), 16), lambda _: False)
    opened(found, "203.0.113.7", 8, idle=False)


def test_a_block_of_ipv6_addresses_is_one_address() -> None:
    found = connections()
    opened(found, "2001:db8::1", 2)
    with pytest.raises(LimitReached):
        found.add("2001:db8::2", Open())
    found.add("2001:db8:0:1::1", Open())


def test_an_address_of_many_callers_has_no_limit_of_its_own() -> None:
    opened(connections(), "10.0.0.1", 50)


def test_where_all_are_in_use_the_address_with_the_most_loses_its_oldest_idle_one() -> None:
    found = connections(each=100, total=10)
    (other,) = opened(found, "203.0.113.1", 1)
    busy, idle = opened(found, "203.0.113.7", 1, idle=False), opened(found, "203.0.113.7", 8)
    opened(found, "203.0.113.2", 1)
    assert [one.dropped for one in (other, *busy, *idle)] == [False, False, True, *[False] * 7]
    assert found.count == 10


def test_a_connection_that_was_dropped_is_not_counted_twice() -> None:
    found = connections(total=1)
    (first,) = opened(found, "203.0.113.1", 1)
    opened(found, "203.0.113.2", 1)
    found.remove("203.0.113.1", first)
    assert (first.dropped, found.count) == (True, 1)


def test_where_every_connection_is_busy_a_new_one_is_refused() -> None:
    found = connections(total=2)
    opened(found, "203.0.113.1", 2, idle=False)
    with pytest.raises(Overloaded, match="limit of 2 connections"):
        found.add("203.0.113.2", Open())


def test_idle_connections_behind_many_busy_ones_are_found_in_time() -> None:
    found = connections(each=1_000, total=3 * LOOKED_AT)
    opened(found, "203.0.113.1", 3 * LOOKED_AT - 1, idle=False)
    (idle,) = opened(found, "203.0.113.1", 1)
    for _ in range(2):
        with pytest.raises(Overloaded):
            found.add("203.0.113.2", Open())
    found.add("203.0.113.2", Open())
    assert idle.dropped
