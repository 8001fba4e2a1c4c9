"""The extractive generator: quotes the sentences that answer the question, each with its citation mark."""

import re
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from itertools import islice, zip_longest

from anabranch.domain.model import Context, Delta, Passage, Prompt, QuotedSpan, Usage, Value
from anabranch.evidence.judge import MAX_S, Judge, Judgement
from anabranch.evidence.judge import SUPPORTED as JUDGED_SUPPORTED
from anabranch.evidence.quotations import POINTS_BACK, Quotation, quotations
from anabranch.text.messages import message
from anabranch.text.sentences import sentences
from anabranch.text.support import (
    MAX_TITLE,
    Wording,
    bare,
    each_bit,
    nearness,
    readable,
    share,
    support,
    word_weights,
)

ABSTAINED = "abstained"
SUPPORTED = 0.5

MAX_PICKED = 3
MAX_SENTENCES = 4
MAX_SIDES = 4
MAX_CHARACTERS = 600
MAX_SENTENCE = 1_000
MAX_HEADING = 80
MAX_READ = 200

# A sentence's score: the weight of the question's words that it adds, its passage's similarity, and whether a picked
# sentence names its passage.
NEARNESS, NAMED = 0.5, 0.3
# Words that are only in its heading have this share of their weight.
HEADING_SHARE = 0.8

LETTER_OR_DIGIT = re.compile(r"[^\W_]")
UNSTOPPED = re.compile(r"[^\d:]*[^\W\d_]")
QUESTION = re.compile(r"[?\uff1f][\"'\u201d\u2019)\]*_]*\Z")
LEAD_IN = re.compile(r"(?:[#>*+\u2022\u2013-]+[ \t]+|\d{1,3}[.)][ \t]+|\[\d{1,5}\]\s*)+")
# A source name that can be a citation mark: a mark has no brackets, and separates names by these signs.
NAMEABLE = re.compile(r"[^\[\]\n,;]{1,500}")
REFERENCE = re.compile(r" ?\[([^\[\]\n]{1,500})\]")
SPACES = re.compile(r"\s+")
# Between two lines of a block quote there is a marker.
BETWEEN_LINES = re.compile(r"[ \t]*\n[ \t]*(?:>[ \t]?)+|\s+")
MAX_NAMED = 3


class Extractive:
    """Answers with words of the passages, verbatim, each quotation with its citation mark; abstains with a message if
    nothing supports an answer. With a judge, the evidence model chooses units; without one, for texts that are not
    English, and where the model has not read, rules choose sentences."""

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge

    async def generate(self, prompt: Prompt, context: Context) -> AsyncGenerator[Delta, None]:
        chosen, supported = await self._chosen(prompt, context)
        if not chosen:
            text = abstention(prompt)
            yield Delta(text=text, usage=Usage(), finish_reason=ABSTAINED, abstained=True, support=supported)
            return
        sides = _disagreeing(prompt)
        if sides:
            yield Delta(text=message("sources_disagree", prompt.language) + "\n", support=supported)
        written = [Written(quotation, prompt, item=True) for quotation in sides]
        written += [Written(quotation, prompt) for quotation in _beside(sides, chosen)]
        for at, (one, following) in enumerate(zip_longest(written, written[1:])):
            last = following is None
            yield Delta(
                text=one.text + ("" if last else _gap(one, following)),
                usage=Usage() if last else None,
                finish_reason="stop" if last else None,
                quotes=one.quotes,
                mark=one.mark,
                support=supported if at == 0 else None,
            )

    async def _chosen(self, prompt: Prompt, context: Context) -> tuple[list[Quotation], float]:
        """What is quoted, and the probability that it answers."""
        judged = await self._judged(prompt, context)
        if judged is not None:
            if judged.support < JUDGED_SUPPORTED:
                return [], judged.support
            found = quotations(prompt.question, prompt.passages, judged)
            return found, judged.support if found else 0.0
        found = [Quotation(one.passage, ((one.start, one.end),)) for one in quotes(prompt.question, prompt.passages)]
        return found, support(prompt.question, prompt.passages) if found else 0.0

    async def _judged(self, prompt: Prompt, context: Context) -> Judgement | None:
        if self._judge is None:
            return None
        now = time.monotonic()
        until = now + min(MAX_S, (context.deadline - now) / 2)
        return await self._judge.judge(prompt.question, prompt.passages, until)


def _gap(one: "Written", following: "Written") -> str:
    """Blocks and lists are paragraphs of their own, and each source has a line."""
    if one.block or following.block or one.item != following.item:
        return "\n\n"
    return "\n" if following.named or following.item else " "


def _disagreeing(prompt: Prompt) -> list[Quotation]:
    """The two sides of each conflict, each with the title of its document."""
    spans = dict.fromkeys(side for one in prompt.conflicts for side in (one.claim, one.against))
    return [
        Quotation(side.passage, ((side.start, side.end),), heading=prompt.passages[side.passage].title)
        for side in list(spans)[:MAX_SIDES]
    ]


def _beside(sides: Sequence[Quotation], chosen: Sequence[Quotation]) -> list[Quotation]:
    """What is quoted beside the sides of a conflict: nothing of it twice."""
    said = [(one.passage, *span) for one in sides for span in one.spans]
    return [
        one
        for one in chosen
        if not any(one.passage == at and a < end and start < b for at, start, end in said for a, b in one.spans)
    ]


def abstention(prompt: Prompt) -> str:
    """Says that the documents do not answer, what was searched, and the nearest thing that was found."""
    refusal = message("refusal_abstained", prompt.language)
    if not prompt.passages:
        return refusal
    first = prompt.passages[0]
    nearest = first if first.evidence is not None else max(prompt.passages, key=lambda passage: passage.score)
    headers = nearest.place.headers if nearest.place is not None else ()
    names = dict.fromkeys(name for name in (nearest.title, *headers[-1:]) if name)
    searched = list(dict.fromkeys(passage.source for passage in prompt.passages))
    shown = ", ".join(searched[:MAX_NAMED]) + (" …" if len(searched) > MAX_NAMED else "")
    where = SPACES.sub(" ", " > ".join(names))[:MAX_TITLE] or shown
    return f"{refusal} {message('refusal_nearest', prompt.language, searched=shown, nearest=where)}"


class Written:
    """A quotation as it is written: its words, then its citation mark, which also replaces bracketed references inside
    it. An `item` is one of a list."""

    def __init__(self, quotation: Quotation, prompt: Prompt, *, item: bool = False) -> None:
        self.block = quotation.block
        self.item = item
        self.named = bool(quotation.source)
        passages = prompt.passages
        passage = passages[quotation.passage]
        name = passage.source if prompt.marks == "sources" else ""
        self.mark = f"[{name}]" if NAMEABLE.fullmatch(name) else f"[{quotation.passage + 1}]"
        self.quotes = tuple(
            QuotedSpan(passage=quotation.passage, start=start, end=end) for start, end in quotation.spans
        )
        parts = [passage.text[start:end] for start, end in quotation.spans]
        if quotation.block:
            words = "\n".join(parts)
        else:
            words = BETWEEN_LINES.sub(
                " ", " ".join(part[found.end() :] if (found := LEAD_IN.match(part)) else part for part in parts)
            )
        heading = self._marked(SPACES.sub(" ", quotation.heading[:MAX_TITLE]), passages).rstrip(" :")
        said = ": ".join(part for part in (quotation.source, heading) if part)
        said += "" if not said or QUESTION.search(said) else ":"
        gap = "\n" if quotation.block else " "
        # Brackets in code and tables are not references.
        words = words if quotation.block else self._marked(words, passages)
        self.text = ("- " if item else "") + (f"{said}{gap}" if said else "") + words + gap + self.mark

    def _marked(self, words: str, passages: Sequence[Passage]) -> str:
        mark = f" {self.mark}"
        sources = {passage.source for passage in passages}

        def replaced(found: re.Match[str]) -> str:
            names = (name.strip() for name in re.split(r"[,;]", found[1]))
            return mark if any(name in sources or _counts(name, len(passages)) for name in names) else found[0]

        words = REFERENCE.sub(replaced, words)
        while words.endswith(mark):
            words = words.removesuffix(mark)
        return words.replace(mark + mark, mark)


class Quote(Value, gc=False):
    """A sentence of a passage, the `order`-th, as character offsets in its text. `words` are the question's words in
    it and in its document's title, `words_with_heading` also those in the heading or the question above it.
    `points_back`: it begins with a word such as "It", which refers to the sentence before."""

    passage: int
    order: int
    start: int
    end: int
    words: int
    words_with_heading: int
    points_back: bool


def quotes(question: str, passages: Sequence[Passage]) -> list[Quote]:
    """The sentences that answer, in reading order; none if the passages do not support an answer."""
    if support(question, passages) < SUPPORTED:
        return []
    wording = Wording(question)
    candidates = [
        quote for index, text in enumerate(readable(passages)) for quote in _read(wording, passages[index], index, text)
    ]
    picked = SentenceSelection(wording, passages, candidates).pick()
    return _in_reading_order(_with_antecedents(picked, candidates), passages)


def _read(wording: Wording, passage: Passage, index: int, text: str) -> Iterator[Quote]:
    """The statements of a passage. A heading or a question adds its words to what follows."""
    title = wording.within(bare(passage.title))
    above = wording.within(" | ".join(passage.place.headers)[:MAX_TITLE]) if passage.place else 0
    last = len(text.rstrip())
    for order, (begin, end) in enumerate(islice(sentences(text), MAX_READ)):
        lead_in = LEAD_IN.match(text, begin, end)
        start = lead_in.end() if lead_in else begin
        found = wording.within(text[start:end])
        if QUESTION.search(text, start, end) or (end < last and _is_heading(text, begin, start, end)):
            above = found
        elif LETTER_OR_DIGIT.search(text, start, end):
            yield Quote(
                passage=index,
                order=order,
                start=start,
                end=_cut(text, start, end),
                words=found | title,
                words_with_heading=found | above | title,
                points_back=POINTS_BACK.match(text, start, end) is not None,
            )


def _is_heading(text: str, begin: int, start: int, end: int) -> bool:
    """Marked as one; or a short line without a full stop that is no item of a list and holds no number or colon."""
    short = begin == start and end - start <= MAX_HEADING
    return text[begin] == "#" or (short and UNSTOPPED.fullmatch(text, start, end) is not None)


def _cut(text: str, start: int, end: int) -> int:
    """Where an overlong sentence is cut: after a word."""
    if end - start <= MAX_SENTENCE:
        return end
    space = text.rfind(" ", start + MAX_SENTENCE // 2, start + MAX_SENTENCE)
    return space if space > 0 else start + MAX_SENTENCE


class SentenceSelection:
    """Picks sentences greedily: each time the one that adds most of the question's words."""

    def __init__(self, wording: Wording, passages: Sequence[Passage], candidates: Sequence[Quote]) -> None:
        self._wording = wording
        self._passages = passages
        self._candidates = candidates
        within = [0] * len(passages)
        for quote in candidates:
            within[quote.passage] |= quote.words_with_heading
        self._near = [
            nearness(passage, share(bits, wording.everything)) for passage, bits in zip(passages, within, strict=True)
        ]
        self._weights = word_weights(wording, within)
        self._titles = [bare(passage.title).strip().lower() for passage in passages]
        self._worth: dict[int, float] = {}

    def pick(self) -> list[Quote]:
        picked: list[Quote] = []
        covered, left = 0, MAX_CHARACTERS
        named: set[int] = set()
        while len(picked) < MAX_PICKED:
            texts = {self._text(quote) for quote in picked}
            rest = [
                q for q in self._candidates if not picked or (q.end - q.start <= left and self._text(q) not in texts)
            ]
            best = max(rest, key=lambda quote: self._value(quote, covered, named), default=None)
            if best is None or (picked and not (best.words_with_heading & ~covered or best.passage in named)):
                break
            picked.append(best)
            covered |= best.words_with_heading
            left -= best.end - best.start
            named = (named | self._names(best)) - {quote.passage for quote in picked}
        return picked

    def _value(self, quote: Quote, covered: int, named: Collection[int]) -> float:
        gain = self._weight(quote.words & ~covered) + HEADING_SHARE * self._weight(
            quote.words_with_heading & ~quote.words & ~covered
        )
        return gain + NEARNESS * self._near[quote.passage] + (NAMED if quote.passage in named else 0.0)

    def _weight(self, bits: int) -> float:
        if bits not in self._worth:
            self._worth[bits] = sum(self._weights[bit] for bit in each_bit(bits))
        return self._worth[bits]

    def _names(self, quote: Quote) -> set[int]:
        """The passages whose title occurs in the sentence."""
        sentence = self._text(quote).lower()
        return {at for at, title in enumerate(self._titles) if len(title) > 2 and title in sentence}

    def _text(self, quote: Quote) -> str:
        return self._passages[quote.passage].text[quote.start : quote.end]


def _with_antecedents(picked: Sequence[Quote], candidates: Sequence[Quote]) -> list[Quote]:
    """Adds the preceding sentence of one that begins with "It" or "This", if there is room."""
    at = {(quote.passage, quote.order): quote for quote in candidates}
    whole = dict.fromkeys(picked)
    left = MAX_CHARACTERS - sum(quote.end - quote.start for quote in picked)
    for quote in picked:
        before = at.get((quote.passage, quote.order - 1))
        if before is None or before in whole or not quote.points_back or len(whole) == MAX_SENTENCES:
            continue
        if before.end - before.start <= left:
            whole[before] = None
            left -= before.end - before.start
    return list(whole)


def _in_reading_order(picked: Sequence[Quote], passages: Sequence[Passage]) -> list[Quote]:
    """Documents in order of first use; sentences in document order."""
    first: dict[tuple[str, str | int], int] = {}
    keyed: list[tuple[int, int, int, int, Quote]] = []
    for quote in picked:
        passage = passages[quote.passage]
        document = first.setdefault((passage.source, passage.document_id or quote.passage), len(first))
        keyed.append((document, passage.place.start if passage.place else 0, quote.passage, quote.start, quote))
    return [quote for *_, quote in sorted(keyed, key=lambda key: key[:-1])]


def _counts(name: str, passages: int) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 6 and 0 < int(name) <= passages
