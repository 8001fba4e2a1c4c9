"""Where a passage ends: a chunk has a size, and ends inside a list, or between a sentence and the code that it
introduces."""

from anabranch.text.units import are_of_one_list, units

# Characters that are added to a chunk at most.
MOST = 800


def completed(text: str, following: str) -> int:
    """The length of the text with the rest of the unit, and of the list, that it ends in; `following` is what the
    document has after it."""
    if not following.strip():
        return len(text)
    found = units(text + following[:MOST])
    if len(following) > MOST and found:
        found.pop()  # it may be cut
    last = next((at for at in reversed(range(len(found))) if found[at].start < len(text)), None)
    if last is None:
        return len(text)
    end = found[last].end
    for before, unit in zip(found[last:], found[last + 1 :], strict=False):
        # A definition stands for itself.
        if unit.kind == "definition" or not are_of_one_list(before, unit):
            break
        end = unit.end
    return max(len(text), end)
