"""Date formats of MCP servers."""

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.sources.mcp.results.fields import parse_date

MAY_5 = datetime(2024, 5, 5, tzinfo=UTC).timestamp()
AT_TEN = MAY_5 + 36_000


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2024-05-05", MAY_5),
        ("  2024/05/05 ", MAY_5),
        ("2024-5-5", MAY_5),
        ("20240505", MAY_5),
        (20240505, MAY_5),
        ("May 5, 2024", MAY_5),
        ("5 May 2024", MAY_5),
        ("Sunday, May 5th, 2024", MAY_5),
        ("Sep. 1, 2024", datetime(2024, 9, 1, tzinfo=UTC).timestamp()),
        ("May 5, 2024 at 10:00 AM", MAY_5),
        ("2024-05-05T10:00:00Z", AT_TEN),
        ("2024-05-05t10:00:00z", AT_TEN),
        ("2024-05-05T10:00:00", AT_TEN),
        ("2024-05-05 10:00:00 UTC", AT_TEN),
        ("2024-05-05 12:00:00 +0200", AT_TEN),
        ("2024-05-05T12:00:00.250+02:00", AT_TEN + 0.25),
        ("2024-05-05T10:00:00.250000000Z", AT_TEN + 0.25),
        ("Sun, 05 May 2024 10:00:00 GMT", AT_TEN),
        ("5 May 2024 06:00:00 -0400", AT_TEN),
        (AT_TEN, AT_TEN),
        (int(AT_TEN), AT_TEN),
        (int(AT_TEN) * 10**3, AT_TEN),
        (int(AT_TEN) * 10**6, AT_TEN),
        (int(AT_TEN) * 10**9, AT_TEN),
        (str(int(AT_TEN)), AT_TEN),
        (f"{int(AT_TEN)}.500000", AT_TEN + 0.5),
        ("2024", datetime(2024, 1, 1, tzinfo=UTC).timestamp()),
        (2024, datetime(2024, 1, 1, tzinfo=UTC).timestamp()),
        ("2024-05", datetime(2024, 5, 1, tzinfo=UTC).timestamp()),
        ("May 2024", datetime(2024, 5, 1, tzinfo=UTC).timestamp()),
        ("1850-03-01", datetime(1850, 3, 1, tzinfo=UTC).timestamp()),
        (-3_781_728_000, datetime(1850, 3, 1, tzinfo=UTC).timestamp()),
        ("1970-01-01", 0.0),
        ("9999-12-31", datetime(9999, 12, 31, tzinfo=UTC).timestamp()),
    ],
)
def test_date_formats_are_parsed(written: object, meant: float) -> None:
    assert parse_date(written) == meant


@pytest.mark.parametrize(
    "written",
    [
        *(
            "",
            "soon",
            "3 days ago",
            "2024-13-01",
            "2024-02-30",
            "May 40, 2024",
            "Foo 5, 2024",
            "12",
            "05/06/2024",
            "0000",
        ),
        *("0001-01-01T00:00:00Z", "2024-05-05" * 100, 0, 0.0, 10**400, math.nan, math.inf, True, None, [], {"a": 1}),
        *("9999-12-31T23:59:59-12:00", "Mon, 99 May 2024 99:99:99 +9999", "\u0662\u0660\u0662\u0664", "\ud800"),
        *("2024\x00", b"2024"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_dates_are_none(written: object) -> None:
    assert parse_date(written) is None


@given(st.datetimes(min_value=datetime(1, 1, 2), timezones=st.just(UTC)))
def test_iso_dates_round_trip(when: datetime) -> None:
    assert parse_date(when.isoformat()) == when.timestamp()


@given(
    st.text()
    | st.integers()
    | st.floats()
    | st.text("0123456789-/:.+TZ ,", max_size=40)
    | st.from_regex(r"\A([A-Z][a-z]{2}, )?\d{1,2} (May|Jun|Xyz) \d{4} \d{1,2}:\d{2}(:\d{2})?.{0,10}\Z")
)
def test_date_parsing_never_raises(written: object) -> None:
    found = parse_date(written)
    assert found is None or math.isfinite(found)
