"""Random answers over random documents: every quote stands where it says, every place is in the answer."""

# ruff: noqa: SIM905  word lists read better as words

import random
from collections.abc import Sequence

import msgspec
import pytest

from anabranch.domain.evidence import EvidencePage, Verdict
from anabranch.domain.model import Passage
from anabranch.pipeline.cite import MAX_CITATIONS
from anabranch.pipeline.verify import NOT_CHECKED, faithfulness
from anabranch.testing import FakeEvidence
from support.quoted_answers import passage
from support.verified_answers import VerifiedAnswer, verified

# 10,000 answers in all. Each share is a test of its own; the first runs with every suite, the others with `make soak`.
SHARES, IN_SUITE, ANSWERS = 20, 1, 500
WORDS = (
    "the a of in at ferry harbour captain leaves arrives takes carries Zanzibar Unguja morning evening 7 12 2.5 hours "
    "113 kg 1902 not never all about naïve café Straße straße ŒUVRE İstanbul ﬁsh e\u0301te\u0301 \U0001f600 "
    "\U0001f469\u200d\U0001f680 zero\u200bwidth שלום שָׁלוֹם مرحبا \u202eabc\u202c 東京は首都。 \ud83d \udc00 ﷺ x_y a/b http://a.example"
).split()
STOPS = (".", ".", ".", "!", "?", "...", "", ":", "。", ".)", '."')
GAPS = (" ", " ", " ", "\n", "\n\n", "  \t", "\r\n", "\u00a0", "\n- ", "\n1. ", "\n> ", "\n\n## ", "\u2028", "")
MARKS = (
    *(
        "[1]",
        "[2]",
        "[3]",
        "[1, 2]",
        "[1][2]",
        "[99]",
        "[0]",
        "[-1]",
        "[lee/notes]",
        "[ann/fish]",
        "[lee/notes; 2]",
        "[x]",
        "[1-2]",
        "[0-9]",
        "[Source 1]",
        "\u30101\u3011",
        "\u00b9",
    ),
    *(
        "[[1]]",
        "[[[[",
        "]]",
        "[1](https://a.example)",
        "[a](b)",
        "`a[1]`",
        "[1",
        "[\u0661]",
        "[1\n2]",
        "[ 1 ]",
        "[1,,1,1]",
    ),
)
BLOCKS = (
    *("```\nferry[1] = 7\n```", "~~~\nx", "| ferry | 7 |\n|---|---|\n| captain | [1] |", "**bold *nested* text**"),
    *("- item [1]\n  - inner [2]\n", "# Title [1]", "Sure!", "Why?", "[1] " * 60, "[" * 200, "word " * 400, "a." * 300),
)


class RandomChecker:
    """Says anything that a ClaimChecker may say, or nothing."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def check(
        self, claim: str, inputs: Sequence[tuple[EvidencePage, ...]], *, until: float | None = None
    ) -> Sequence[Verdict | None]:
        return [self._verdict(claim, pages) for pages in inputs]

    def _verdict(self, claim: str, pages: tuple[EvidencePage, ...]) -> Verdict | None:
        if self._chance.random() < 0.1:
            return None
        shares = [self._chance.random() ** 4 for _ in range(3)]
        supported, unknown, contradicted = (share / sum(shares) for share in shares)
        places = sorted(self._chance.randrange(len(claim) + 1) for _ in range(self._chance.choice((0, 2, 6))))
        units = self._chance.randrange(len(pages[0].units) + 1)
        return Verdict(
            supported=supported,
            unknown=unknown,
            contradicted=contradicted,
            units=tuple(self._chance.uniform(-4, 4) for _ in range(units)),
            words=tuple(
                (start, end, self._chance.uniform(-4, 4)) for start, end in zip(places[::2], places[1::2], strict=True)
            ),
        )


def sentence(chance: random.Random) -> str:
    words = (chance.choice(WORDS) for _ in range(chance.choice((1, 3, 6, 9, 14))))
    return " ".join(words).capitalize() + chance.choice(STOPS)


def document(chance: random.Random) -> str:
    parts: list[str] = []
    for _ in range(chance.randrange(1, 7)):
        parts += [chance.choice(BLOCKS) if chance.random() < 0.08 else sentence(chance), chance.choice(GAPS)]
    return "".join(parts)


def chunks(text: str, number: int, chance: random.Random) -> list[Passage]:
    """Passages of one document, which overlap."""
    found = []
    for at in range(chance.randrange(1, 3)):
        start = chance.randrange(max(1, len(text) // 2)) if at else 0
        end = min(len(text), start + chance.choice((40, 150, 400)))
        own = passage(text[start:end], f"D{number}", chance.choice(("lee/notes", "ann/fish")))
        assert own.place is not None
        place = msgspec.structs.replace(own.place, start=start, end=end)
        remote = chance.random() < 0.2
        found.append(msgspec.structs.replace(own, place=None if remote else place, document_id=str(number)))
    return found


def edited(words: str, chance: random.Random) -> str:
    """Words of a passage as a model writes them: the same, with other white space or case, reworded, or cut."""
    parts = words.split()
    match chance.randrange(6):
        case 0:
            return words
        case 1:
            return chance.choice(("  ", "\n", " \t")).join(parts)
        case 2:
            return " ".join(parts).swapcase()
        case 3:
            return " ".join(chance.sample(parts, len(parts)))
        case 4:
            return " ".join(parts).replace("7", "9")
        case _:
            return words[: chance.randrange(len(words) + 1)]


def written(passages: Sequence[Passage], chance: random.Random) -> str:
    parts: list[str] = []
    for _ in range(chance.choice((0, 1, 2, 3, 5))):
        kind = chance.random()
        if kind < 0.6 and passages:
            text = chance.choice(passages).text
            start = chance.choice((0, 0, chance.randrange(len(text) + 1)))
            parts.append(edited(text[start : start + chance.choice((30, 80, 200))], chance))
        else:
            parts.append(sentence(chance) if kind < 0.85 else chance.choice(BLOCKS))
        marks = "".join(chance.choice(MARKS) for _ in range(chance.choice((0, 0, 1, 1, 2))))
        parts += [chance.choice((" ", "", ". ")), marks, chance.choice(GAPS)]
    return "".join(parts)


def cut(text: str, chance: random.Random) -> list[str]:
    size = chance.choice((1, 3, 7, 40, len(text) + 1))
    return [text[at : at + size] for at in range(0, len(text), size)]


def check_quotes(answer: VerifiedAnswer, passages: Sequence[Passage], documents: Sequence[str]) -> None:
    quoted = [(one.passage, one.start, one.end) for sentence in answer.found.sentences for one in sentence.quotes]
    cited = [(one.passage, one.passage_start, one.passage_end) for one in answer.found.citations]
    for number, start, end in (*quoted, *cited):
        own = passages[number]
        assert 0 <= start <= end <= len(own.text)
        if own.place is not None and own.document_id is not None:
            whole = documents[int(own.document_id)]
            assert whole[own.place.start + start : own.place.start + end] == own.text[start:end]
    assert all(passages[number].text[start:end].strip() for number, start, end in quoted)
    assert all(one.source == passages[one.passage].source for one in answer.found.citations)


def check_places(answer: VerifiedAnswer) -> None:
    text, at = answer.found.text, 0
    for one in answer.found.sentences:
        assert at <= one.start < one.end <= len(text)
        assert not text[at : one.start].strip()
        assert all(one.start <= start < end <= one.end for start, end in one.doubted)
        assert one.corrected + one.removed <= one.marks
        assert (one.verdict == "unchecked") == (one.reason is not None) == (one.support is None)
        at = one.end
    rest = text[at:].strip()
    noted = answer.found.left_out or any(one.reason in NOT_CHECKED for one in answer.found.sentences)
    assert not rest or noted or answer.found.withheld or not answer.found.sentences
    ends = {one.end for one in answer.found.sentences}
    for citation in answer.found.citations:
        mark = text[citation.start : citation.end]
        assert (mark[:1] + mark[-1:]) in ("[]", "\u3010\u3011") or (not mark and citation.start in ends)
    starts = [one.start for one in answer.found.citations]
    assert starts == sorted(starts)
    assert len(starts) <= MAX_CITATIONS


@pytest.mark.parametrize(
    "share", [share if share < IN_SUITE else pytest.param(share, marks=pytest.mark.soak) for share in range(SHARES)]
)
async def test_every_quote_of_a_random_answer_stands_where_it_says(share: int) -> None:
    quoted = 0
    for number in range(ANSWERS):
        seed = share * ANSWERS + number
        chance = random.Random(seed)
        documents = [document(chance) for _ in range(chance.randrange(4))]
        passages = [one for at, text in enumerate(documents) for one in chunks(text, at, chance)]
        text = written(passages, chance)
        strict, streaming = chance.random() < 0.3, chance.random() < 0.6
        checker = FakeEvidence() if chance.random() < 0.5 else RandomChecker(chance)
        answer = await verified(
            cut(text, chance), passages, checker, strict=strict, streaming=streaming, minimum=chance.choice((None, 0.5))
        )
        try:
            check_quotes(answer, passages, documents)
            check_places(answer)
            assert answer.tokens == answer.found.text
            quoted += sum(len(one.quotes) for one in answer.found.sentences)
            assert [event.sentence for event in answer.checked][: len(answer.found.sentences)] == list(
                answer.found.sentences
            )
            if not strict and not answer.found.withheld:
                assert answer.found.text == text
                assert answer.found.faithfulness == faithfulness(answer.found.sentences)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {text!r}")
            raise
    assert quoted > ANSWERS / 2
