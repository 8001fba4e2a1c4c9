"""What the pipeline's stages note about passages. It is loaded only for a question that asks for an explanation."""

from collections.abc import Sequence

from anabranch.domain.explanation import Explanation, Key, Notes, explained
from anabranch.domain.model import Answer, Passage, Prompt, Question, SourceReply
from anabranch.evidence.judge import Judgement
from anabranch.pipeline.prompt import Compaction, estimate

NOT_READ = "not read: "
# What limits a prompt.
SETTINGS = {"documents": "AGGREGATOR_MAX_CONTEXT_TOKENS", "numbered": "AGGREGATOR_QUERY_CONTEXT_TOKENS"}
COMPACT_TOKENS = "AGGREGATOR_COMPACT_TOKENS"


class PipelineNotes(Notes):
    """Notes of the stages from the sources' replies to the prompt."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self._question = question
        self._unread: dict[Key, str] = {}

    def returned(self, replies: Sequence[SourceReply]) -> None:
        """What the stages of each source did, and what it returned."""
        for reply in replies:
            if reply.explanation is not None:
                self.include(reply.explanation)
            for rank, passage in enumerate(reply.passages, 1):
                self.add(passage, "source", rank=rank, score=passage.score)

    def judged(self, passages: Sequence[Passage], judged: Judgement | str) -> None:
        """Why the evidence model did not read some passages, or any."""
        reasons = [judged] * len(passages) if isinstance(judged, str) else _reasons(judged)
        self._unread.update({explained(one).key: why for one, why in zip(passages, reasons, strict=True)})

    def ranked_by_evidence(self, passages: Sequence[Passage], most: int) -> None:
        """The passages in the order of the evidence; so many of them go on."""
        for rank, passage in enumerate(passages, 1):
            if passage.evidence is None:
                self.add(passage, "evidence", rank=rank, note=f"{NOT_READ}{self._unread[explained(passage).key]}")
            else:
                self.add(passage, "evidence", rank=rank, probability=passage.evidence)
        self._cut_off(passages, most)

    def not_judged(self, passages: Sequence[Passage], most: int) -> None:
        for passage in passages:
            self.add(passage, "evidence", note=f"{NOT_READ}the evidence model is off for this question")
        self._cut_off(passages, most)

    def _cut_off(self, passages: Sequence[Passage], most: int) -> None:
        note = "below the limit of top_k passages for each source"
        for passage in passages[most:]:
            self.add(passage, "top_k", left_out=True, note=note, most=most)

    def composed(self, passages: Sequence[Passage], prompt: Prompt, budget: int, compaction: Compaction | None) -> None:
        """The place of each passage in the prompt, or that there was no room for it. The prompt has them in their
        order; one may be cut, but only at its end."""
        setting = SETTINGS[self._question.profile.prompt]
        shown_note, left_out_note = "", "no room for it in the prompt"
        if compaction is not None:
            budget, setting = compaction.tokens, COMPACT_TOKENS
            shown_note, left_out_note = "as excerpts", f"{left_out_note}, or too little of it bears on the question"
        number, whole = 0, set(map(id, passages))
        for passage in passages:
            shown = prompt.passages[number] if number < len(prompt.passages) else None
            if shown is passage or (shown is not None and id(shown) not in whole and _is_part(shown, passage)):
                number += 1
                cut = len(passage.text) - len(shown.text)
                note = f"without its last {cut:,} characters: no room ({setting})" if cut else shown_note
                self.add(passage, "prompt", rank=number, note=note)
            else:
                note, tokens = f"{left_out_note} ({setting})", estimate(passage.text)
                self.add(passage, "budget", left_out=True, note=note, tokens=tokens, budget=budget)

    def ended(self, answer: Answer, similarity: float) -> Explanation:
        """All ways. Without a prompt, the passages are the result, or they were too weak for an answer."""
        if answer.prompt_version is None and not answer.refused:
            self.ranked(answer.passages, "result")
        elif answer.prompt_version is None:
            note, least = "the passages are too weak for an answer", self._question.threshold
            for passage in answer.passages:
                self.add(passage, "guard", left_out=True, note=note, similarity=similarity, threshold=least)
        return self.explanation()


def _reasons(judged: Judgement) -> list[str]:
    """Why each passage was not read, if it was not."""
    stopped = "a passage read before it answers" if judged.sure else "no time was left"
    reasons = {at: stopped if units else "it has no sentence" for at, units in judged.whole.items()}
    return [reasons.get(at, "other passages are more likely to answer") for at in range(len(judged.passages))]


def _is_part(shown: Passage, passage: Passage) -> bool:
    return shown.source == passage.source and shown.title == passage.title and passage.text.startswith(shown.text)
