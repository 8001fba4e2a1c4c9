"""Numbers with units, and dates, that a text states, in whatever form it writes them."""

# ruff: noqa: SIM905  word lists read better as words

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from anabranch.text.reading import ReadText, TextToken, is_content, root
from anabranch.text.support import STOP

_SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_SMALL += "seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_CARDINALS = {word: float(i) for i, word in enumerate(_SMALL)} | {w: 20.0 + 10 * i for i, w in enumerate(_TENS)}
_ORDINALS = {
    word: float(i)
    for i, word in enumerate(
        "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
        "fifteenth sixteenth seventeenth eighteenth nineteenth".split(),
        start=1,
    )
} | {word[:-1] + "ieth": 20.0 + 10 * i for i, word in enumerate(_TENS)}
_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "dozen": 12.0}
_SCALES |= {word + "s": scale for word, scale in _SCALES.items()}
_SHORT_SCALES = {"k": 1e3, "m": 1e6, "mn": 1e6, "bn": 1e9}
_TIMES = {"once": 1.0, "twice": 2.0, "thrice": 3.0, "double": 2.0, "doubled": 2.0, "doubles": 2.0, "doubling": 2.0}
_TIMES |= {"triple": 3.0, "tripled": 3.0, "triples": 3.0, "tripling": 3.0, "twofold": 2.0, "threefold": 3.0}
_TIMES |= {"quadruple": 4.0, "quadrupled": 4.0, "fourfold": 4.0, "fivefold": 5.0, "sixfold": 6.0, "tenfold": 10.0}
_GROUPS = {"both": 2.0, "pair": 2.0, "pairs": 2.0, "couple": 2.0, "twin": 2.0, "twins": 2.0, "duo": 2.0, "trio": 3.0}
_GROUPS |= {"single": 1.0, "sole": 1.0, "trilogy": 3.0, "quartet": 4.0, "quarter": 0.25, "quarters": 0.25}
_PARTS = {"half": 0.5, "halves": 0.5, "halved": 0.5, "halving": 0.5, "halve": 0.5}
_PARTS |= {"third": 1 / 3, "thirds": 1 / 3, "quarter": 0.25, "quarters": 0.25}
_PARTS |= {word + s: 1 / value for word, value in _ORDINALS.items() if 4 <= value <= 12 for s in ("", "s")}
_MONTHS = "january february march april may june july august september october november december".split()
MONTHS = {word: i for i, word in enumerate(_MONTHS, start=1)}
MONTHS |= {word[:3]: i for word, i in MONTHS.items()} | {"sept": 9}

_TIME = {"millisecond": 1e-3, "msec": 1e-3, "microsecond": 1e-6, "nanosecond": 1e-9, "second": 1.0, "sec": 1.0}
_TIME |= {"minute": 60.0, "min": 60.0, "hour": 3600.0, "hr": 3600.0, "day": 86400.0, "week": 604800.0}
_TIME |= {"fortnight": 1209600.0, "month": 2629800.0, "year": 31557600.0, "yr": 31557600.0, "decade": 315576000.0}
_TIME |= {"century": 3155760000.0, "millennium": 31557600000.0}
_SIZES = {"bit": 0.125, "byte": 1.0, "kb": 1e3, "kib": 1024.0, "kilobyte": 1e3, "mb": 1e6, "mib": 1048576.0}
_SIZES |= {"megabyte": 1e6, "gb": 1e9, "gib": 1073741824.0, "gigabyte": 1e9, "tb": 1e12, "terabyte": 1e12}
_SIZES |= {"kbit": 125.0, "kilobit": 125.0, "mbit": 125e3, "megabit": 125e3, "gbit": 125e6, "gigabit": 125e6}
_LENGTHS = {"nanometre": 1e-9, "nm": 1e-9, "micrometre": 1e-6, "micron": 1e-6, "um": 1e-6}
_LENGTHS |= {"millimetre": 1e-3, "mm": 1e-3, "centimetre": 1e-2, "cm": 1e-2, "metre": 1.0, "kilometre": 1e3}
_LENGTHS |= {"km": 1e3, "mile": 1609.344, "mi": 1609.344, "inch": 0.0254, "foot": 0.3048, "ft": 0.3048, "yard": 0.9144}
_LENGTHS |= {"feet": 0.3048, "inches": 0.0254}
_LENGTHS |= {name[:-2] + "er": size for name, size in _LENGTHS.items() if name.endswith("tre")}
_WEIGHTS = {"nanogram": 1e-9, "ng": 1e-9, "microgram": 1e-6, "ug": 1e-6, "mcg": 1e-6}
_WEIGHTS |= {"milligram": 1e-3, "mg": 1e-3, "gram": 1.0, "kilogram": 1e3, "kilo": 1e3, "kg": 1e3, "tonne": 1e6}
_WEIGHTS |= {"ton": 1e6, "ounce": 28.35, "oz": 28.35, "lb": 453.592}
# Units that cannot be converted into each other have sizes that no factor connects.
_DIMENSIONS: dict[str, dict[str, float]] = {
    "time": _TIME,
    "size": _SIZES,
    "length": _LENGTHS,
    "weight": _WEIGHTS,
    "volume": {
        "millilitre": 1e-3,
        "ml": 1e-3,
        "litre": 1.0,
        "liter": 1.0,
        "gallon": 3.785,
        "pint": 0.473,
        "quart": 0.946,
    },
    "area": {"hectare": 1e4, "ha": 1e4, "acre": 4046.86},
    "frequency": {"hz": 1.0, "khz": 1e3, "mhz": 1e6, "ghz": 1e9, "hertz": 1.0, "megahertz": 1e6, "gigahertz": 1e9},
    "power": {"watt": 1.0, "kilowatt": 1e3, "kw": 1e3, "megawatt": 1e6, "mw": 1e6, "gigawatt": 1e9, "gw": 1e9}
    | {"horsepower": 745.7, "hp": 745.7},
    "energy": {"joule": 1.0, "kj": 1e3, "calorie": 4.184, "kcal": 4184.0, "kwh": 3.6e6},
    "concentration": {"nanomolar": 1e-9, "micromolar": 1e-6, "millimolar": 1e-3},
    "mass of molecules": {"kda": 1e3, "kilodalton": 1e3, "dalton": 1.0},
    "speed": {"knot": 1.0, "mph": 0.869, "kph": 0.54},
    "money": {
        "dollar": 1.0,
        "euro": 1.3e9,
        "pound": 1.7e18,
        "yen": 1.9e27,
        "rupee": 2.3e36,
        "franc": 2.9e45,
        "cent": 0.01,
    }
    | {"pence": 1.7e16, "penny": 1.7e16, "$": 1.0, "\u20ac": 1.3e9, "\u00a3": 1.7e18, "\u00a5": 1.9e27, "usd": 1.0}
    | {"eur": 1.3e9, "gbp": 1.7e18, "jpy": 1.9e27, "inr": 2.3e36, "\u20b9": 2.3e36, "chf": 2.9e45},
    "temperature": {"celsius": 1.0, "fahrenheit": 1e9, "kelvin": 1e18},
    "turn": {"degree": 1.0, "radian": 57.2958},
    "text": {"character": 1.0, "word": 1e6, "line": 1e12, "page": 1e18, "paragraph": 1e24, "tab": 1e31, "column": 1e37},
}
# What may stand before a number.
CURRENCIES = frozenset(["$", "\u20ac", "\u00a3", "\u00a5", "\u20b9", "USD", "EUR", "GBP", "JPY", "INR", "CHF"])
# Only straight after a number.
_LETTERS = {"s": ("time", 1.0), "h": ("time", 3600.0), "ms": ("time", 1e-3), "d": ("time", 86400.0)}
_LETTERS |= {
    "m": ("length", 1.0),
    "g": ("weight", 1.0),
    "l": ("volume", 1.0),
    "w": ("power", 1.0),
    "j": ("energy", 1.0),
}
_LETTERS |= {"us": ("time", 1e-6), "ns": ("time", 1e-9), "mya": ("time", 31557600.0 * 1e6)}
_MOLAR = {"nM": ("concentration", 1e-9), "uM": ("concentration", 1e-6), "mM": ("concentration", 1e-3)}
UNITS = {root(name): (kind, size) for kind, names in _DIMENSIONS.items() for name, size in names.items()}
UNITS |= {name: (kind, size) for kind, names in _DIMENSIONS.items() for name, size in names.items()}
# As adverbs and adjectives: the unit's own word.
_ADVERBS = {
    "daily": "day",
    "weekly": "week",
    "monthly": "month",
    "yearly": "year",
    "annual": "year",
    "annually": "year",
}
_ADVERBS |= {"hourly": "hour", "nightly": "day", "biweekly": "week", "centuries": "century", "decadal": "decade"}

_NEAR = frozenset("about around roughly approximately approx some circa ca ~ \u2248 nearly almost close".split())
_ABOVE = frozenset("over above exceeding exceeds exceeded beyond".split())
_BELOW = frozenset("under below nearly almost".split())
_SINCE = frozenset("in since for until from".split())
_LABELS = frozenset("version versions number no season chapter section part step level type issue rfc release".split())

NUMBER_WORDS = frozenset({*_CARDINALS, *_ORDINALS, *_SCALES})
_ARTICLES = frozenset("a an past last per every".split())
_STARTS = frozenset({*MONTHS, *_CARDINALS, *_SCALES, *_ORDINALS, *_TIMES, *_PARTS, *_GROUPS, *_ARTICLES})
MAX_QUANTITIES = 120
LARGEST = 1e24


Kind = Literal["number", "group", "ordinal", "share", "year", "period", "times", "version"]


class Quantity(NamedTuple):
    """A number as a text states it. `dimension` and `size`: of its unit; `nouns`: the stems of what is counted;
    `slack`: how far a source's number may lie from it, as factors; `named`: it belongs to a name, as in Python 3."""

    kind: Kind
    value: float
    text: str
    at: int
    dimension: str = ""
    size: float = 1.0
    nouns: tuple[str, ...] = ()
    slack: tuple[float, float] = (1.0, 1.0)
    spelled: bool = False
    unit: str = ""
    implied: bool = False
    named: bool = False


class Day(NamedTuple):
    """A date; 0 for the parts that the text leaves open."""

    year: int
    month: int
    day: int
    text: str


@lru_cache(maxsize=20_000)
def unit_of(token: TextToken) -> tuple[str, float] | None:
    """The dimension and size of a unit that is written as a word."""
    if token.low == "second" and token.raw != "second":
        return None
    if token.raw in _MOLAR:
        return _MOLAR[token.raw]
    return UNITS.get(_ADVERBS.get(token.low, token.low)) or (UNITS.get(token.stem) if len(token.low) > 3 else None)


class Quantities:
    """The numbers and dates of a text, in order."""

    def __init__(self, reading: ReadText) -> None:
        self._tokens = reading.tokens
        self.numbers: list[Quantity] = []
        self.days: list[Day] = []
        self.loose: set[float] = set()
        self.unit_places: set[int] = set()
        end = 0
        for at, token in enumerate(self._tokens):
            if at >= end and (token.low in _STARTS or token.low[-1].isdigit()):
                end = self._read(at)
                if len(self.numbers) + len(self.days) >= MAX_QUANTITIES:
                    break
        self._share_units()
        self._join_times()

    def _join_times(self) -> None:
        """One time of two units, as in 1 h 30 min and two years and eight months."""
        for i in range(len(self.numbers) - 1, 0, -1):
            last, one = self.numbers[i], self.numbers[i - 1]
            if one.dimension == last.dimension == "time" and one.size > last.size and 2 <= last.at - one.at <= 3:
                if last.at - one.at == 3 and self._tokens[last.at - 1].low != "and":
                    continue
                value = one.value + last.value * last.size / one.size
                text = f"{one.text} {last.text}"
                self.numbers[i - 1 : i + 1] = [one._replace(value=value, text=text, slack=(0.99, 1.01))]

    def _share_units(self) -> None:
        for i in range(len(self.numbers) - 1, 0, -1):
            last, one = self.numbers[i], self.numbers[i - 1]
            between = self._tokens[one.at + 1 : last.at]
            if (
                (last.dimension or last.nouns) and one.kind == last.kind == "number"
                and not one.dimension and not one.nouns
                and 1 <= len(between) <= 2 and between[-1].low in ("to", "-", "and", "or", "/")
            ):  # fmt: skip
                self.numbers[i - 1] = one._replace(
                    dimension=last.dimension, size=last.size, unit=last.unit, nouns=last.nouns
                )

    def _read(self, at: int) -> int:
        token = self._tokens[at]
        if token.low[-1].isdigit():
            return self._day(at) or self._digits(at)
        if token.low in MONTHS:
            return self._day(at) or at + 1
        if token.low in _CARDINALS or token.low in _SCALES:
            return self._spelled(at)
        if token.low in _ORDINALS:
            return self._ordinal(at)
        if token.low in _TIMES:
            self._add("times", _TIMES[token.low], at, at + 1)
        elif token.low == "half" and at + 1 < len(self._tokens) and self._tokens[at + 1].low in ("a", "an"):
            return self._implied(at + 1, 0.5)
        elif token.low in _PARTS:
            self._add("share", _PARTS[token.low], at, at + 1)
        elif token.low in _ARTICLES:
            return self._implied(at, 1.0)
        elif token.low in _GROUPS:
            self._add("group", _GROUPS[token.low], at, at + 1, spelled=True)
        return at + 1

    # -- dates

    def _day(self, at: int) -> int:
        """A date that begins here; the place after it, 0 if there is none."""
        tokens = self._tokens
        raws = [token.raw for token in tokens[at : at + 6]]
        if re.fullmatch(r"[12]\d{3}", raws[0]) and len(raws) > 4 and raws[1] == raws[3] == "-":
            month, day = raws[2], raws[4][:2]
            if month.isdigit() and len(month) == 2 and day.isdigit() and 1 <= int(month) <= 12 and tokens[at + 4].glued:
                return self._dated(int(raws[0]), int(month), int(day), at, at + 5)
        if _is_month(tokens[at]):
            return self._month_first(at)
        after = at + 1
        if not (raws[0].isdigit() and len(raws[0]) <= 2 and 1 <= int(raws[0]) <= 31):
            return 0
        if after < len(tokens) and tokens[after].glued and tokens[after].low in ("st", "nd", "rd", "th"):
            after += 1
        if after < len(tokens) and tokens[after].low == "of":
            after += 1
        if after >= len(tokens) or not _is_month(tokens[after]):
            return 0
        year, end = self._year_at(after + 1)
        return self._dated(year, MONTHS[tokens[after].low], int(raws[0]), at, end)

    def _month_first(self, at: int) -> int:
        tokens, month, end, day = self._tokens, MONTHS[self._tokens[at].low], at + 1, 0
        if end < len(tokens) and tokens[end].raw == ".":
            end += 1
        if end < len(tokens) and re.fullmatch(r"\d\d?", tokens[end].raw) and 1 <= int(tokens[end].raw) <= 31:
            day = int(tokens[end].raw)
            end += 1
            if end < len(tokens) and tokens[end].glued and tokens[end].low in ("st", "nd", "rd", "th"):
                end += 1
        year, end = self._year_at(end)
        if not day and not year and tokens[at].low in ("may", "mar", "sec", "dec", "jan", "march") and at == 0:
            return 0
        return self._dated(year, month, day, at, end)

    def _year_at(self, at: int) -> tuple[int, int]:
        """The year that follows a month, after a comma or "of"."""
        tokens, start = self._tokens, at
        while at < len(tokens) and at < start + 2 and tokens[at].low in (",", "of", "."):
            at += 1
        if at < len(tokens) and re.fullmatch(r"[12]\d{3}", tokens[at].raw):
            return int(tokens[at].raw), at + 1
        return 0, start

    def _dated(self, year: int, month: int, day: int, at: int, end: int) -> int:
        self.days.append(Day(year, month, day, self._spell(at, end)))
        if year:
            self.numbers.append(Quantity("year", float(year), str(year), at))
        self.loose.update((float(day), float(year)))
        return end

    # -- numbers

    def _digits(self, at: int) -> int:
        token = self._tokens[at]
        raw, end = token.raw, at + 1
        inside = self._is_inside(at)
        if raw.count(".") > 1 or ":" in raw or ("," in raw and not re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", raw)):
            for part in re.split(r"[,:]", raw):
                self._loosely(part)
            if not inside and "," not in raw:
                self.numbers.append(Quantity("version", 0.0, raw, at, named=True))
            return end
        value = min(float(raw.replace(",", "")[:40]), LARGEST)
        self.loose.add(value)
        if inside:
            return end
        after = self._tokens[end].low if end < len(self._tokens) and self._tokens[end].glued else ""
        if after in ("st", "nd", "rd", "th"):
            return self._century(value, at, end + 1) or self._add("ordinal", value, at, end + 1)
        if after == "s" and raw.isdigit() and raw.endswith("0") and len(raw) in (2, 4):
            return self._period(value, 100.0 if raw.endswith("00") else 10.0, at, end + 1)
        if after == "x":
            return self._add("times", value, at, end + 1)
        if after in _SHORT_SCALES and unit_of(self._tokens[end]) is None and after != "m":
            return self._add("number", value * _SHORT_SCALES[after], at, end + 1)
        if after and after[0].isalpha() and after not in _LETTERS and unit_of(self._tokens[end]) is None:
            return end + 1  # part of an identifier, as in 3D
        return self._scaled(value, at, end, spelled=False)

    def _is_inside(self, at: int) -> bool:
        """Whether the digits are part of a name: sha256, COVID-19."""
        tokens = self._tokens
        if not tokens[at].glued or at == 0:
            return False
        before = tokens[at - 1].raw
        dash = before == "-" and at > 1 and tokens[at - 1].glued and tokens[at - 2].raw[-1].isalpha()
        return before[-1].isalpha() or before == "_" or dash

    def _loosely(self, part: str) -> None:
        if part.replace(".", "", 1).isdigit():
            self.loose.add(float(part[:40]))

    def _spelled(self, at: int) -> int:
        """A number in words: adds up until a word that is no number."""
        tokens, end, total, group = self._tokens, at, 0.0, 0.0
        while end < len(tokens):
            word = tokens[end].low
            if word in _CARDINALS:
                value = _CARDINALS[word]
                if (
                    end > at
                    and tokens[end - 1].low in _CARDINALS
                    and not (value < 10 <= _CARDINALS[tokens[end - 1].low])
                ):
                    break
                if end > at + 1 and tokens[end - 1].raw == "-" and _CARDINALS.get(tokens[end - 2].low, 0) < 20:
                    break
                group += value
            elif word in _SCALES and (end == at or word != "dozens"):
                group = min(max(group, 1.0) * _SCALES[word], LARGEST)
                if _SCALES[word] >= 1000:
                    total, group = total + group, 0.0
            elif not (
                (word == "-" or (word == "and" and tokens[end - 1].low in _SCALES))
                and end + 1 < len(tokens)
                and (tokens[end + 1].low in _CARDINALS or tokens[end + 1].low in _SCALES)
                and (word == "and" or tokens[end].glued)
            ):
                break
            end += 1
        if tokens[at].low.endswith("s") and tokens[at].low in _SCALES:
            return end  # hundreds, thousands: not exact
        value = total + group
        self.loose.add(value)
        part = end + (1 if end < len(tokens) and tokens[end].raw == "-" else 0)
        if part < len(tokens) and tokens[part].low in _PARTS and tokens[part].low != "half":
            return self._add("share", value * _PARTS[tokens[part].low], at, part + 1)
        if part < len(tokens) and (tokens[part].low in _ORDINALS) and value >= 20:
            return self._century(value + _ORDINALS[tokens[part].low], at, part + 1) or self._add(
                "ordinal", value + _ORDINALS[tokens[part].low], at, part + 1
            )
        return self._scaled(value, at, end, spelled=True)

    def _ordinal(self, at: int) -> int:
        tokens, word = self._tokens, self._tokens[at].low
        before = tokens[at - 1].low if at else ""
        after = tokens[at + 1].low if at + 1 < len(tokens) else ""
        if word == "second" and (
            before in ("per", "one", "/", "each", "every", "half", "-") or after in ("s", ".", ",")
        ):
            return at + 1
        if word in _PARTS and before in ("a", "an", "one") and not (after and after[0].isalpha() and after not in STOP):
            return self._add("share", _PARTS[word], at, at + 1)
        return self._century(_ORDINALS[word], at, at + 1) or self._add("ordinal", _ORDINALS[word], at, at + 1)

    def _century(self, value: float, at: int, end: int) -> int:
        tokens = self._tokens
        if end < len(tokens) and tokens[end].raw == "-":
            end += 1
        if end < len(tokens) and tokens[end].low in ("century", "centuries"):
            return self._period((value - 1) * 100, 100.0, at, end + 1)
        return 0

    def _period(self, start: float, length: float, at: int, end: int) -> int:
        if start < 100 and length == 10:
            start += 1900
        self.numbers.append(Quantity("period", start, self._spell(at, end), at, size=length))
        return end

    def _scaled(self, value: float, at: int, end: int, *, spelled: bool) -> int:
        """With the words after it: million, percent, times, of ten."""
        tokens = self._tokens
        if (
            end < len(tokens)
            and tokens[end].low in _SCALES
            and tokens[end].low not in ("hundreds", "thousands", "millions")
        ):
            value *= _SCALES[tokens[end].low]
            end += 1
        word = tokens[end].low if end < len(tokens) else ""
        following = tokens[end + 1].low if end + 1 < len(tokens) else ""
        if word in ("%", "percent", "pct") or (word == "per" and following == "cent"):
            return self._add("share", value / 100, at, end + (2 if word == "per" else 1))
        if word == "-" and following in ("percent", "%"):
            return self._add("share", value / 100, at, end + 2)
        if word in ("times", "fold") or (word == "-" and following == "fold"):
            return self._add("times", value, at, end + 1)
        if not spelled and 1000 <= value <= 2100 and tokens[at].raw.isdigit() and not word.startswith("%"):
            return self._calendar_year(value, at, end)
        return self._add("number", value, at, end, spelled=spelled)

    def _calendar_year(self, value: float, at: int, end: int) -> int:
        """A number that may be a year, and the second year of 1998-99."""
        tokens = self._tokens
        unit = tokens[end] if end < len(tokens) else None
        if (at and tokens[at - 1].raw in CURRENCIES) or (
            unit is not None and (unit_of(unit) or unit.low in _LETTERS) and unit.low != "d"
        ):
            return self._add("number", value, at, end)
        self.numbers.append(
            Quantity("year", value, tokens[at].raw, at, nouns=self._nouns(end), slack=_rounding(tokens, at))
        )
        if end + 1 < len(tokens) and tokens[end].raw in "-/" and re.fullmatch(r"\d\d", tokens[end + 1].raw):
            second = value - value % 100 + int(tokens[end + 1].raw)
            if second > value:
                self.numbers.append(Quantity("year", second, tokens[end + 1].raw, end + 1))
                return end + 2
        return end

    def _add(self, kind: Kind, value: float, at: int, end: int, *, spelled: bool = False) -> int:
        tokens = self._tokens
        dimension, size, unit = "", 1.0, ""
        place = end + (1 if end < len(tokens) and tokens[end].raw == "-" else 0)
        priced = at > 0 and tokens[at - 1].raw in CURRENCIES
        if kind == "number":
            known = None
            place += self._of_country(place)
            if place < len(tokens):
                if (
                    tokens[place].low in ("square", "sq", "cubic")
                    and place + 1 < len(tokens)
                    and unit_of(tokens[place + 1])
                ):
                    self.unit_places.add(place + 1)
                    return self._add_power(value, at, place, spelled=spelled)
                known = unit_of(tokens[place]) or (_LETTERS.get(tokens[place].low) if not spelled else None)
            if known:
                unit = tokens[place].stem
                self.unit_places.add(place)
                end = place + 1
            elif priced:
                known, unit = UNITS[tokens[at - 1].low], tokens[at - 1].low
            if known:
                dimension, size = known
        nouns = () if dimension else self._nouns(place)
        self.loose.add(value)
        self.numbers.append(
            Quantity(
                kind,
                value, self._spell(at, end), at, dimension, size, nouns,
                slack=_rounding(tokens, at), spelled=spelled, unit=unit,
                named=value < 30 and not priced and self._is_named(at),
            )
        )  # fmt: skip
        return end

    def _of_country(self, at: int) -> int:
        """1 if a name is followed by a currency, as in US dollars; else 0."""
        names = self._tokens[at : at + 2]
        if len(names) < 2 or not names[0].raw[0].isupper() or unit_of(names[0]) is not None:
            return 0
        unit = unit_of(names[1])
        return int(unit is not None and unit[0] == "money")

    def _implied(self, at: int, value: float) -> int:
        """A unit after an article: a year, a year and a half, half a year, half a dozen."""
        tokens = self._tokens
        if at + 1 >= len(tokens):
            return at + 1
        if tokens[at + 1].low == "dozen":
            return self._add("number", 12.0 * value, at, at + 2, spelled=True)
        unit = unit_of(tokens[at + 1])
        if unit is None or tokens[at + 1].low == "second":
            return at + 1
        if [token.low for token in tokens[at + 2 : at + 5]] == ["and", "a", "half"]:
            value += 0.5
        self.numbers.append(
            Quantity("number", value, self._spell(at, at + 2), at, *unit, unit=tokens[at + 1].stem, implied=True)
        )
        return at + 2

    def _is_named(self, at: int) -> bool:
        """Whether the number belongs to a name, as in Python 3 or 15 Penn Plaza."""
        tokens = self._tokens
        before = tokens[at - 1] if at else None
        if before is not None:
            if before.low in _LABELS or ("." in tokens[at].raw and before.low in _SINCE):
                return True
            # The first word of a sentence is taken for a name, whatever its case.
            if is_content(before) and (at == 1 or before.raw[0].isupper()):
                return True
        return at + 1 < len(tokens) and tokens[at + 1].raw[0].isupper() and not tokens[at + 1].glued

    def _add_power(self, value: float, at: int, place: int, *, spelled: bool) -> int:
        """A number of square or cubic units."""
        tokens, power = self._tokens, 3 if self._tokens[place].low == "cubic" else 2
        known = unit_of(tokens[place + 1])
        assert known is not None
        dimension = {2: "area", 3: "volume of length"}[power] if known[0] == "length" else f"{known[0]} {power}"
        self.numbers.append(
            Quantity(
                "number", value, self._spell(at, place + 2), at, dimension, known[1] ** power,
                slack=_rounding(tokens, at), spelled=spelled, unit=tokens[place + 1].stem,
            )
        )  # fmt: skip
        return place + 2

    def _nouns(self, at: int) -> tuple[str, ...]:
        """The stems of what is counted: at most three words, up to a sign or a word without content."""
        nouns = []
        for token in self._tokens[at : at + 4]:
            if token.raw == "-":
                continue
            if not is_content(token) or token.low[0].isdigit() or token.low in _CARDINALS:
                break
            nouns.append(token.stem)
        return tuple(nouns[:3])

    def _spell(self, at: int, end: int) -> str:
        return "".join(
            token.raw if i == 0 or token.glued else " " + token.raw for i, token in enumerate(self._tokens[at:end])
        )


def _is_month(token: TextToken) -> bool:
    return token.low in MONTHS and token.raw[0].isupper()


def _rounding(tokens: Sequence[TextToken], at: int) -> tuple[float, float]:
    """How far a source's number may lie from a claimed one, by the words before it."""
    before = [token.low for token in tokens[max(0, at - 3) : at]]
    low, high = 1.0, 1.0
    if before and (before[-1] in ("a", "the") or tokens[at - 1].raw in CURRENCIES):
        before.pop()
    last = before[-1] if before else ""
    two = " ".join(before[-2:])
    if last in _NEAR or two in ("close to", "in around"):
        low, high = 0.95, 1.05
    if last in _ABOVE or two in ("more than", "greater than", "at least", "upwards of"):
        high = 1.25
    if last in _BELOW or two in ("less than", "fewer than", "up to", "at most"):
        low = 0.8
    return low, high
