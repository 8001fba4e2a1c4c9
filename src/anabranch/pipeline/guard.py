"""Guard: is there enough to answer from, and if not, what is missing?"""

from collections.abc import Sequence

from anabranch.domain.model import Ground, Passage, SourceReply, Status


def ground(replies: Sequence[SourceReply], passages: Sequence[Passage]) -> Ground:
    if passages:
        return Ground.DOCUMENTS
    if not replies:
        return Ground.NO_SOURCES
    if all(reply.status is not Status.SUCCESS for reply in replies):
        return Ground.ALL_FAILED
    return Ground.NOTHING_FOUND


def refusal(missing: Ground, replies: Sequence[SourceReply]) -> str:
    """An answer that says what is missing, in place of one that nothing carries."""
    if missing is Ground.NO_SOURCES:
        return "No source was asked, so there is nothing to answer from. Name at least one source."
    failed = [reply for reply in replies if reply.status is not Status.SUCCESS]
    if missing is Ground.ALL_FAILED:
        none = "The source did not answer" if len(replies) == 1 else f"None of the {len(replies)} sources answered"
        return f"{none}, so there is nothing to answer from."
    searched = f"{len(replies) - len(failed)} of {len(replies)} sources" if failed else f"all {len(replies)} sources"
    return f"Nothing that answers this was found in {searched if len(replies) > 1 else 'the source'}."
