"""Verify: checks each sentence of an answer against the passages, while the model is still writing."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from anabranch.domain.contracts import Clock, Emit, RunInThread
from anabranch.domain.errors import AnabranchError
from anabranch.domain.events import AnswerEvent, SentenceChecked, Token
from anabranch.domain.evidence import ClaimChecker, EvidencePage, Verdict
from anabranch.domain.model import (
    CheckedSentence,
    Citation,
    Delta,
    Passage,
    QuotedSpan,
    SourceConflict,
    SupportingQuote,
    UncheckedReason,
)
from anabranch.evidence.claims import Comparison, Finding, Quoted, ReadPassages, best_of, finding, in_claim
from anabranch.evidence.conflicts import MAX_S as MAX_CONFLICTS_S
from anabranch.evidence.conflicts import both_sides, conflicts
from anabranch.pipeline.cite import MAX_CITATIONS, Marks, SupportingWords, WrittenMark, cited
from anabranch.pipeline.prompt_injection import TURN
from anabranch.text.citation_marks import without_marks
from anabranch.text.language import is_english
from anabranch.text.messages import message
from anabranch.text.statements import Statement, StatementReader, claims_something, without_signs

if TYPE_CHECKING:
    from anabranch.text.safe_markdown import SafeMarkdown

# Sentences of an answer, comparisons that a model checks, and characters of a sentence. After too many sentences, or
# from one on that is too long, the rest of the answer is one that is not checked.
MAX_SENTENCES, MAX_CHECKED, MAX_STATEMENT = 1_000, 80, 50_000
# Units of passages that are compared with the sentences of an answer, each as often as with one: about three seconds.
# Not the time is the limit, so that a replay of the answer ends its comparisons at the same sentence.
MAX_UNITS_COMPARED = 1_000_000
# The seconds for the sentences that are left when the answer is written. A checker that has not replied a moment after
# them is not waited for.
MAX_S, MOMENT_S = 4.0, 0.25
# The share of the time that is left, if that is less.
SHARE = 0.5
# The support of a sentence that reports both sides of a conflict.
IN_PART = 0.5
RELEASED = ("supported", "partly", "unchecked")
# Why a sentence that may be wrong was not checked: a strict answer says how many there are.
NOT_CHECKED = ("off", "over_budget", "not_english", "code", "unfinished", "unavailable")
# What a sentence counts for in the faithfulness of an answer; those that were not checked do not count.
WORTH = {"supported": 1.0, "partly": 0.5, "unsupported": 0.0, "contradicted": 0.0}


class Verified(NamedTuple):
    """An answer with its checked sentences; `text` is what was passed on. `withheld`: that says why
    there is no answer."""

    text: str
    sentences: tuple[CheckedSentence, ...]
    citations: tuple[Citation, ...]
    faithfulness: float | None
    unfaithful: bool = False
    withheld: bool = False
    left_out: int = 0


class Compared(NamedTuple):
    """What is decided about a claim without a model; else what a model has to compare it with."""

    decided: Finding | UncheckedReason | None
    comparisons: Sequence[Comparison] = ()


class QuotedPart(NamedTuple):
    """A part of an answer whose generator says itself which words it quotes."""

    start: int
    end: int
    quotes: tuple[QuotedSpan, ...]
    citations: tuple[Citation, ...]


class Verifier:
    """Verifies answers. `reason` is why the checker may not check."""

    def __init__(
        self,
        checker: ClaimChecker,
        clock: Clock,
        *,
        minimum: float | None = None,
        reason: UncheckedReason = "unavailable",
        run: RunInThread = asyncio.to_thread,
    ) -> None:
        self._checker = checker
        self._clock = clock
        self._run = run
        self._minimum = minimum
        self._reason = reason

    async def conflicts(
        self, question: str, passages: Sequence[Passage], left_s: float, crashed: Callable[[Exception], None]
    ) -> tuple[SourceConflict, ...]:
        """Where the passages contradict each other on what is asked; nothing if the checker fails, with which `crashed`
        is called, or does not reply in time."""
        limit_s = min(left_s, MAX_CONFLICTS_S)
        try:
            async with asyncio.timeout(limit_s + MOMENT_S):
                until = self._clock.monotonic() + limit_s
                return await conflicts(self._checker, question, passages, until, self._run)
        except TimeoutError:
            pass
        except AnabranchError:
            raise
        except Exception as error:  # noqa: BLE001  task boundary: a bug of a checker must not fail the answer
            crashed(error)
        return ()

    def verifying(
        self,
        passages: Sequence[Passage],
        emit: Emit,
        *,
        strict: bool,
        streaming: bool,
        deadline: float,
        language: str | None,
        crashed: Callable[[Exception], None] = lambda _: None,
        conflicts: Sequence[SourceConflict] = (),
        markdown: "SafeMarkdown | None" = None,
    ) -> "Verifying":
        """A verification of one answer, whose events it passes on. `crashed` is called with a failure of the checker;
        `markdown` reads what a strict answer passes on, if it has to be safe."""
        check = SentenceCheck(self._checker, passages, self._clock, self._reason, crashed, conflicts, self._run)
        hold = self._minimum is not None and not streaming
        release = Release(emit, strict=strict, hold=hold, markdown=markdown, run=self._run)
        return Verifying(check, passages, release, self._minimum, self._clock, deadline, language)


class SentenceCheck:
    """Checks the sentences of one answer. Comparing runs in a thread, the model in its own."""

    def __init__(
        self,
        checker: ClaimChecker,
        passages: Sequence[Passage],
        clock: Clock,
        reason: UncheckedReason = "unavailable",
        crashed: Callable[[Exception], None] = lambda _: None,
        conflicts: Sequence[SourceConflict] = (),
        run: RunInThread = asyncio.to_thread,
    ) -> None:
        self._checker = checker
        self._run = run
        self._passages = passages
        self._clock = clock
        self._conflicts = conflicts
        self._reason: UncheckedReason = reason
        self._crashed = crashed
        self._read: ReadPassages | None = None
        self._checked = 0
        self._units_left = MAX_UNITS_COMPARED
        self._until: float | None = None
        self._late = False
        # The same on the event loop's clock, and what ends the check that is under way.
        self._ends: float | None = None
        self._limit: asyncio.Timeout | None = None

    def end_at(self, until: float, left_s: float) -> None:
        """Give the checks `left_s` seconds from now, until the time `until`."""
        self._until, self._ends = until, asyncio.get_running_loop().time() + left_s + MOMENT_S
        if self._limit is not None:
            self._limit.reschedule(self._ends)

    async def find(self, claim: str, marked: Sequence[Sequence[int]]) -> Finding | UncheckedReason:
        """What is found about a claim with marks that name these passages."""
        try:
            return await self._finding(claim, marked)
        except AnabranchError:
            raise
        except Exception as error:  # noqa: BLE001  task boundary: a bug of a checker must not fail the answer
            self._crashed(error)
            self._crashed = lambda _: None
            return "unavailable"

    async def _finding(self, claim: str, marked: Sequence[Sequence[int]]) -> Finding | UncheckedReason:
        cited = list(dict.fromkeys(passage for passages in marked for passage in passages))
        compared = await self._run(self._compared, claim, cited)
        assert self._read is not None
        found: list[Finding] = []
        missing = list(marked)
        for candidate, asked, differing in compared.comparisons:
            supported = any(one.verdict == "supported" for one in found)
            if supported and not any(candidate.passage in named for named in missing):
                continue
            if self._checked >= MAX_CHECKED:
                return best_of(found) if supported else "over_budget"
            self._checked += 1
            (verdict,) = await self._asked(asked.text, (self._read.page(candidate),)) or [None]
            verdict = in_claim(verdict, asked)
            if verdict is None and not supported:
                return self._unchecked()
            if verdict is not None:
                found.append(finding(claim, self._read, candidate, verdict, differing))
            missing = [named for named in missing if candidate.passage not in named]
        if not compared.comparisons:
            # A recording has the moment of every decision, because it has every call.
            await self._asked(claim)
        if compared.decided is not None:
            return compared.decided
        best = best_of(found)
        if best.verdict == "unsupported" and not self._read.complete:
            return "over_budget"
        return best if best.verdict == "supported" else self._reported(claim, cited) or best

    def _reported(self, claim: str, cited: Sequence[int]) -> Finding | None:
        """Of a sentence that reports both sides of a conflict: each of them supports a part of it, although it
        contradicts the other."""
        if (one := both_sides(claim, cited, self._passages, self._conflicts)) is None:
            return None
        sides = tuple(Quoted(side.passage, (side.start, side.end)) for side in (one.claim, one.against))
        return Finding("partly", IN_PART, sides)

    async def _asked(self, claim: str, *inputs: tuple[EvidencePage, ...]) -> Sequence[Verdict | None]:
        """What the checker says; nothing if it does not reply in time, and then it is not asked again."""
        try:
            async with asyncio.timeout_at(self._ends) as self._limit:
                return await self._checker.check(claim, inputs, until=self._until)
        except TimeoutError:
            self._late, self._checked = True, MAX_CHECKED
            return ()
        finally:
            self._limit = None

    def _unchecked(self) -> UncheckedReason:
        """Why the checker has not checked."""
        ended = self._until is not None and self._clock.monotonic() >= self._until
        return "over_budget" if self._late or ended else self._reason

    def _compared(self, claim: str, cited: Sequence[int]) -> Compared:
        if self._read is None:
            self._read = ReadPassages(self._passages)
        if (copied := self._read.copied(claim, cited)) is not None:
            return Compared(Finding("supported", 1.0, (copied,)))
        if self._reason == "off":
            return Compared("off")
        if not is_english(claim) or not self._read.is_english:
            return Compared("not_english")
        self._units_left -= self._read.units
        if self._checked >= MAX_CHECKED or self._units_left < 0:
            return Compared("over_budget")
        chosen = self._read.candidates(claim, cited)
        if chosen and not self._read.in_english(chosen[0]):
            return Compared("not_english")
        return Compared(None, [self._read.comparison(claim, one) for one in chosen])


class Release:
    """What of an answer is passed on, and when: as it comes; with `strict`, what is supported; with `hold`, nothing
    before all is checked."""

    def __init__(
        self, emit: Emit, *, strict: bool, hold: bool, markdown: "SafeMarkdown | None", run: RunInThread
    ) -> None:
        self.emit = emit
        self._run = run
        self.strict = strict
        self.hold = hold
        self._markdown = markdown
        self.text = ""
        self.left_out = 0
        # How much of what was written is decided, and whether the last of it was left out.
        self._decided = 0
        self._cut = False

    @property
    def follows(self) -> bool:
        return not (self.strict or self.hold)

    async def add(self, text: str) -> None:
        self.text += text
        if text and not self.hold:
            await self.emit(Token(text=text))

    async def sentence(self, written: str, statement: Statement, *, released: bool) -> int | None:
        """By how much a sentence of a strict answer moves; None if it is left out. So is one that is not safe any more
        without what was left out before: code may have begun there."""
        # Before the first sentence, there is nothing to separate it from.
        begin = self._decided if self.text else statement.start
        piece = written[begin : statement.end]
        self._decided = statement.end
        joins = self._cut and self.text and not (self.text[-1].isspace() or piece[0].isspace())
        gap = " " if joins else ""
        if not released or not self._is_safe(gap + piece):
            self.left_out += 1
            self._cut = True
            return None
        moved = len(self.text) + len(gap) - begin
        self._cut = False
        await self.add(gap + piece)
        return moved

    async def end(self, written: str, note: str) -> None:
        """Pass on what follows the last sentence, and a note."""
        rest = written[self._decided :]
        safe = await self._run(self._is_safe, rest) if len(rest) > TURN else self._is_safe(rest)
        await self.add((rest if safe else "") + note)

    def _is_safe(self, text: str) -> bool:
        return self._markdown is None or self._markdown.accepts(text)


class Verifying:
    """Reads the tokens of one answer, and checks its sentences in their order as soon as they are complete."""

    def __init__(
        self,
        check: SentenceCheck,
        passages: Sequence[Passage],
        release: Release,
        minimum: float | None,
        clock: Clock,
        deadline: float,
        language: str | None,
    ) -> None:
        self._check = check
        self._passages = passages
        self._release = release
        self._minimum = minimum
        self._clock = clock
        self._deadline = deadline
        self._language = language
        self._reader = StatementReader(MAX_SENTENCES, MAX_STATEMENT)
        self._marks = Marks(passages)
        self._quoted: list[QuotedPart] = []
        self._waiting: asyncio.Queue[Statement | None] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._nearest = SupportingWords(passages)
        self._sentences: list[CheckedSentence] = []
        self._citations: list[Citation] = []
        self._abstained = self._cut_off = False
        # Characters that were read since other tasks got a turn.
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.cancel()
            # It may have failed before the answer did: that failure is not the one to report.
            await asyncio.gather(self._worker, return_exceptions=True)

    def learn(self, delta: Delta) -> None:
        """What the generator says about the next token: what it quotes, that it is no answer, or that it is cut off."""
        self._cut_off = self._cut_off or delta.finish_reason not in (None, "stop")
        if delta.abstained:
            self._abstained = True
        elif delta.quotes:
            start = self._reader.length
            citations = tuple(cited(delta, start, self._passages))
            self._quoted.append(QuotedPart(start, start + len(delta.text), delta.quotes, citations))

    async def emit(self, event: AnswerEvent) -> None:
        if not isinstance(event, Token):
            await self._release.emit(event)
        elif self._abstained:
            # Says that there is no answer: there is nothing to check.
            self._release.text += event.text
            await self._release.emit(event)
        else:
            if self._release.follows:
                await self._release.emit(event)
            for at in range(0, len(event.text), TURN):
                await self._add(event.text[at : at + TURN])

    async def _add(self, part: str) -> None:
        self._take(self._reader.add(part))
        self._turn += len(part)
        if self._turn >= TURN:
            self._turn = 0
            await asyncio.sleep(0)

    async def finish(self) -> Verified:
        """Wait for the sentences that are left."""
        if self._abstained:
            return Verified(self._release.text, (), (), None)
        now = self._clock.monotonic()
        left_s = min(MAX_S, max(0.0, self._deadline - now) * SHARE)
        self._check.end_at(now + left_s, left_s)
        self._take(self._reader.end(cut_off=self._cut_off))
        if self._worker is not None:
            self._waiting.put_nowait(None)
            await self._worker
        score = faithfulness(self._sentences)
        low = self._minimum is not None and score is not None and score < self._minimum
        written = self._reader.text
        if self._release.strict:
            await self._release.end(written, self._note(written))
        text = self._release.text if self._release.strict else written
        return await self._released(text, score, low=low) if self._release.hold else self._verified(text, score, low)

    def _take(self, complete: Sequence[Statement]) -> None:
        for statement in complete:
            self._waiting.put_nowait(statement)
        if complete and self._worker is None:
            self._worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while (statement := await self._waiting.get()) is not None:
            sentence, citations = await self._checked(statement)
            if self._release.strict:
                released = sentence.verdict in RELEASED
                moved = await self._release.sentence(self._reader.text, statement, released=released)
                if moved is None:
                    continue
                sentence, citations = _moved(sentence, citations, moved)
            self._sentences.append(sentence)
            self._citations += citations[: max(0, MAX_CITATIONS - len(self._citations))]
            if not self._release.hold:
                await self._release.emit(SentenceChecked(index=len(self._sentences) - 1, sentence=sentence))

    async def _checked(self, statement: Statement) -> tuple[CheckedSentence, list[Citation]]:
        if statement.rest or statement.unfinished:
            return _unchecked(statement, "over_budget" if statement.rest else "unfinished", 0), []
        text = self._reader.text[statement.start : statement.end]
        parts = [one for one in self._quoted if one.start < statement.end and statement.start < one.end]
        if parts:
            return self._quotation(statement, text, parts)
        marks = list(self._marks.written(text, statement.start))
        found = await self._finding(statement, marks)
        if isinstance(found, str):
            if found == "no_claim":
                # There is nothing that a passage could support.
                return _unchecked(statement, found, len(marks), removed=len(marks)), []
            return _unchecked(statement, found, len(marks)), self._unverified(text, marks)
        citations, corrected, removed, added = _cited(statement, marks, found, self._passages)
        checked = CheckedSentence(
            start=statement.start,
            end=statement.end,
            verdict=found.verdict,
            support=found.support,
            quotes=tuple(_supporting(one.passage, *one.span, found.support) for one in found.quotes),
            doubted=tuple((statement.start + start, statement.start + end) for start, end in found.doubted),
            marks=len(marks),
            corrected=corrected,
            removed=removed,
            added=added,
        )
        return checked, citations

    def _quotation(
        self, statement: Statement, text: str, parts: Sequence[QuotedPart]
    ) -> tuple[CheckedSentence, list[Citation]]:
        """A statement that the generator quotes, with those of the quotes of its parts that have its words. It is in
        two parts where one seems to go on: "etc." does not say that a sentence ends."""
        citations = [one for part in parts for one in part.citations if statement.start <= one.start < statement.end]
        marks = len({one.start for one in citations})
        said = " ".join(without_marks(text).split())
        if not said:
            return _unchecked(statement, "no_claim", marks), citations
        quotes = [one for part in parts for one in part.quotes]
        quoted = [(one, " ".join(self._passages[one.passage].text[one.start : one.end].split())) for one in quotes]
        own = [one for one, words in quoted if words in said or said in words] or quotes
        checked = CheckedSentence(
            start=statement.start,
            end=statement.end,
            verdict="supported",
            support=1.0,
            quotes=tuple(_supporting(one.passage, one.start, one.end, 1.0) for one in own),
            marks=marks,
        )
        return checked, citations

    async def _finding(self, statement: Statement, marks: Sequence[WrittenMark]) -> Finding | UncheckedReason:
        # Marks and signs become spaces, so that places in the claim are places in the sentence.
        parts, at = [], statement.start
        for start, end, _ in marks:
            if start >= at:
                parts += [self._reader.text[at:start], " " * (end - start)]
                at = end
        claim = "".join((*parts, self._reader.text[at : statement.end]))
        if not statement.code:
            claim = without_signs(claim)
        if not statement.code and not claims_something(claim):
            return "no_claim"
        found = await self._check.find(claim, [mark.named for mark in marks if mark.named])
        if statement.code and not (isinstance(found, Finding) and found.verdict == "supported"):
            return "code"
        return found

    def _unverified(self, text: str, marks: Sequence[WrittenMark]) -> list[Citation]:
        """The citations of a sentence that was not checked: the words that are nearest to it."""
        claim = without_marks(text).strip(" \t\r\n.!?,;:").lower()
        room = max(0, MAX_CITATIONS - len(self._citations))
        named = [mark for mark in marks if mark.named][:room]
        found = [(start, end, self._nearest.find(claim, passages)) for start, end, passages in named]
        return [
            _citation(start, end, Quoted(one.passage, (one.start, one.end)), self._passages)
            for start, end, one in found
        ]

    def _note(self, written: str) -> str:
        """How many sentences of a strict answer were left out, and how many others were not checked."""
        unchecked = sum(sentence.reason in NOT_CHECKED for sentence in self._sentences)
        counts = {"left_out": self._release.left_out, "not_checked": unchecked}
        notes = [
            message(name if count > 1 else f"{name}_one", self._language, count=count)
            for name, count in counts.items()
            if count
        ]
        gap = "" if not notes or not self._release.text or written.endswith("\n\n") else "\n\n"
        return gap + " ".join(notes)

    async def _released(self, text: str, score: float | None, *, low: bool) -> Verified:
        """Of an answer that was held back: all of it, or why it is withheld."""
        if low and score is not None:
            why = message("withheld", self._language, percent=round(score * 100))
            await self._release.emit(Token(text=why))
            return Verified(why, (), (), score, unfaithful=True, withheld=True)
        await self._release.emit(Token(text=text))
        for index, sentence in enumerate(self._sentences):
            await self._release.emit(SentenceChecked(index=index, sentence=sentence))
        return self._verified(text, score, low)

    def _verified(self, text: str, score: float | None, unfaithful: bool) -> Verified:
        left_out = self._release.left_out
        nothing_left = self._release.strict and all(sentence.reason == "no_claim" for sentence in self._sentences)
        return Verified(text, tuple(self._sentences), tuple(self._citations), score, unfaithful, nothing_left, left_out)


def faithfulness(sentences: Sequence[CheckedSentence]) -> float | None:
    """The share of the checked sentences that the sources support; half of one that they support partly. None if none
    was checked."""
    worth = [WORTH[sentence.verdict] for sentence in sentences if sentence.verdict in WORTH]
    return round(sum(worth) / len(worth), 4) if worth else None


def _cited(
    statement: Statement, marks: Sequence[WrittenMark], found: Finding, passages: Sequence[Passage]
) -> tuple[list[Citation], int, int, int]:
    """The citations of a sentence, how many of its marks were corrected, how many were removed, and how many were
    missing. A mark that names the passage of a quote keeps it; one that does not gets the quotes that no mark names;
    without such a mark the citation is at the end of the sentence. A sentence that is contradicted gets no other
    passage as its source than those that it names."""
    citations: list[Citation] = []
    quoted = {one.passage for one in found.quotes}
    right = [mark for mark in marks if not quoted.isdisjoint(mark.named)]
    wrong = [mark for mark in marks if quoted.isdisjoint(mark.named)]
    named = {passage for mark in right for passage in mark.named}
    if found.verdict == "contradicted":
        quoted &= named
    added: set[int] = set()
    for one in found.quotes:
        if one.passage not in quoted:
            continue
        own = [mark for mark in right if one.passage in mark.named] if one.passage in named else wrong
        citations += [_citation(mark.start, mark.end, one, passages) for mark in own[:MAX_CITATIONS]]
        if not own:
            added.add(one.passage)
            citations.append(_citation(statement.end, statement.end, one, passages))
    corrected = 0 if quoted <= named else len(wrong)
    return sorted(citations, key=lambda one: one.start), corrected, len(wrong) - corrected, len(added)


def _supporting(passage: int, start: int, end: int, support: float) -> SupportingQuote:
    return SupportingQuote(passage=passage, start=start, end=end, support=support)


def _citation(start: int, end: int, quoted: Quoted, passages: Sequence[Passage]) -> Citation:
    return Citation(
        start=start,
        end=end,
        source=passages[quoted.passage].source,
        passage=quoted.passage,
        passage_start=quoted.span[0],
        passage_end=quoted.span[1],
    )


def _unchecked(statement: Statement, reason: UncheckedReason, marks: int, removed: int = 0) -> CheckedSentence:
    start, end = statement.start, statement.end
    return CheckedSentence(start=start, end=end, verdict="unchecked", reason=reason, marks=marks, removed=removed)


def _moved(sentence: CheckedSentence, citations: Sequence[Citation], by: int) -> tuple[CheckedSentence, list[Citation]]:
    """The same at another place of the answer, from which sentences before were left out."""
    sentence = msgspec.structs.replace(
        sentence,
        start=sentence.start + by,
        end=sentence.end + by,
        doubted=tuple((start + by, end + by) for start, end in sentence.doubted),
    )
    return sentence, [msgspec.structs.replace(one, start=one.start + by, end=one.end + by) for one in citations]
