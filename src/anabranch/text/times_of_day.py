"""Times of day in a text: 6 pm, 6:30 p.m., 18:30."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from anabranch.text.sentences import Span

_TIME = re.compile(
    r"(?<![\w:.])(?:(?P<hour>1[0-2]|0?[1-9])(?:[:.](?P<minute>[0-5]\d))?\s?(?P<half>[ap])\.?m\b\.?"
    r"|(?P<hour24>[01]?\d|2[0-3]):(?P<minute24>[0-5]\d)(?![\w:]|\s?[ap]\.?m\b))",
    re.IGNORECASE,
)


class TimeOfDay(NamedTuple):
    minutes: int
    text: str
    span: Span


def times_of_day(text: str) -> Iterator[TimeOfDay]:
    for found in _TIME.finditer(text):
        if found["half"] is None:
            hour, minute = int(found["hour24"]), found["minute24"]
        else:
            hour = int(found["hour"]) % 12 + (12 if found["half"].lower() == "p" else 0)
            minute = found["minute"] or "0"
        yield TimeOfDay(hour * 60 + int(minute), found[0], found.span())
