"""Exact checks of a claim against evidence: numbers, units, dates, names, negation, quantifiers and directions."""

from anabranch.text.bound_checks import bound_findings
from anabranch.text.name_checks import name_findings
from anabranch.text.negation import negation_findings
from anabranch.text.opposites import opposite_findings, restriction_findings
from anabranch.text.quantity_checks import quantity_findings
from anabranch.text.reading import ExactDifference, ReadText

# What is beyond is not read: the cost of a call is bounded for every input.
MAX_CLAIM = 2_000
MAX_EVIDENCE = 8_000


def differences(claim: str, evidence: str, context: str = "") -> tuple[ExactDifference, ...]:
    """What the claim, a sentence of an answer, says otherwise than the evidence, the words of a passage that support it
    best. The same fact in another form is no difference, nor is a name or number of the context (the passage's title,
    headings and other sentences), unless the evidence has another one in its place."""
    said, shown, around = (
        ReadText(claim[:MAX_CLAIM]),
        ReadText(evidence[:MAX_EVIDENCE]),
        ReadText(context[:MAX_EVIDENCE]),
    )
    if " ".join(said.text.lower().split()) in " ".join(shown.text.lower().split()):
        return ()
    return (
        *quantity_findings(said, shown, around),
        *bound_findings(said, shown),
        *name_findings(said, shown, around),
        *negation_findings(said, shown),
        *opposite_findings(said, shown),
        *restriction_findings(said, shown),
    )
