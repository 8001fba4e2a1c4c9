"""How each set of data is used, in one table."""

from typing import NamedTuple

WHOLE, FEW_UNITS = 0.3, 0.12


class Source(NamedTuple):
    """How often a question of a set is drawn in an epoch, and what may be made of it beside the question itself."""

    draws: float = 1.0
    # The share of draws that are also read together with near passages, whole; and with a few units of each, as the
    # product reads several passages.
    joint: float = 0.0
    sparse: float = 0.0
    # The question with another name, number or meaning, which the passage does not answer.
    changed: bool = False
    # The passage without its evidence, which does not answer.
    cut: bool = True
    # Sentences of its passages become claims.
    claims: bool = False
    # The share of draws that teach whether a passage answers. The others only teach which of its units does.
    judged: float = 1.0


QUESTIONS = {
    "2wiki": Source(joint=WHOLE, sparse=FEW_UNITS, claims=True),
    "bio": Source(joint=WHOLE, sparse=FEW_UNITS),
    "boolq": Source(joint=WHOLE, claims=True),
    "covid": Source(joint=WHOLE, sparse=FEW_UNITS, claims=True),
    # These questions share words with their answer, and names with nothing else: a model that learns from them when to
    # say "not answered" looks for names, and refuses what people ask in their own words.
    "docs": Source(draws=0.6, joint=WHOLE, sparse=FEW_UNITS, claims=True, judged=0.15),
    "hotpot": Source(joint=WHOLE, sparse=FEW_UNITS, claims=True),
    "iirc": Source(cut=False),
    "nq": Source(joint=WHOLE, sparse=FEW_UNITS, changed=True, claims=True),
    "nqswap": Source(),
    "policy": Source(),
    "pubmed": Source(),
    "reqa": Source(joint=WHOLE),
    "rl": Source(claims=True),
    "squad1": Source(joint=WHOLE, sparse=FEW_UNITS, changed=True, claims=True),
    "squad2": Source(joint=WHOLE, sparse=FEW_UNITS, changed=True, claims=True),
    "squadrl": Source(joint=WHOLE, sparse=FEW_UNITS, changed=True, claims=True),
    # Few, and nearest to what people ask.
    "written": Source(draws=2.0, joint=0.5, sparse=0.4, claims=True),
    "xquad": Source(joint=WHOLE, sparse=FEW_UNITS, changed=True, claims=True),
}
OTHER = Source()
# Questions that need several passages, all of them known, are few and are drawn more often.
SEVERAL_DRAWS = 3

# Draws of a claim in an epoch; and claims made from sentences and from questions with their answers.
CLAIMS = {"snli": 0.3, "mnli": 0.7, "fm2": 2.0, "claims": 2.0}
MADE_CLAIMS = 80_000

# Sets whose label is for the whole passage only: whether a question and a passage belong together.
PASSAGE_ONLY = {"pubmed"}


def source(name: str) -> Source:
    return QUESTIONS.get(name, OTHER)
