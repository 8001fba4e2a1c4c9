"""A passage as the evidence model reads it: its title with the innermost headings, and its units with what stands
before them. Training and answering share it, so that the model is asked about what it was trained on."""

from collections.abc import Sequence

from anabranch.domain.evidence import EvidencePage, ReadableUnit
from anabranch.text.sentences import Span
from anabranch.text.units import Unit, units

# Of a deep path only the innermost headings are read: the title has few tokens.
INNERMOST = 2


def titled(title: str, headers: Sequence[str]) -> str:
    """The document's title and the innermost headings above a passage."""
    return " > ".join((title, *(header for header in headers[-INNERMOST:] if header != title)))


def page(title: str, headers: Sequence[str], text: str, found: Sequence[Unit] | None = None) -> EvidencePage:
    """The page of a passage; `found` are its units, if they are known."""
    read = []
    heading: str | None = headers[-1] if headers else None
    lead: Span | None = None
    for unit in units(text) if found is None else found:
        above = text[slice(*unit.heading)] if unit.heading else heading
        before = [above] if above and above != heading else []
        if unit.kind == "row" and unit.lead and unit.lead != lead:
            before.append(_header_row(text[slice(*unit.lead)]))
        read.append(ReadableUnit(text=text[unit.start : unit.end], before="\n".join(before)))
        heading, lead = above, unit.lead
    return EvidencePage(title=titled(title, headers), units=tuple(read))


def _header_row(lines: str) -> str:
    """A table's header without the line that separates it."""
    return "\n".join(line for line in lines.splitlines() if any(map(str.isalnum, line)))
