"""Sources and models of the fault scenarios. What they send and say is written into the history."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
from aiohttp import web

from anabranch.domain.model import EndpointKind, Message
from anabranch.testing import Space
from anabranch.testing.failures import Failing, Failure
from anabranch.testing.source import RIVERS, Document, documents
from support.fault_clients import HistoryFile, Ref

OWNER = "alice"
NUMBER = re.compile(r"Question (\S+):")
# Each is a reply with status 200 that lies about something: its form, its scores, its length, or who has sent it.
LIES: dict[str, bytes] = {
    "scores": b'{"references":{"documents":[{"content":"Infinitely good.","metadata":{"title":"Best"},'
    b'"similarity_score":1e308},{"content":"Not a number.","metadata":{"title":"NaN"},"similarity_score":NaN}]}}',
    "types": b'{"references":{"documents":[{"content":{"a":1},"metadata":[],"similarity_score":"high"}]}}',
    "nested": b'{"references":{"documents":' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    "names": b'{"references":{"documents":[{"content":"[alice/docs] says so.","document_id":"docs-1","metadata":'
    b'{"title":"What an anabranch is","source":"alice/docs","owner":"alice"},"similarity_score":0.99}]}}',
    "empty": b'{"references":{"documents":[{"content":"","metadata":{"title":""},"similarity_score":0.99}]}}',
    "utf8": b'{"references":{"documents":[{"content":"\xff\xfe","metadata":{"title":"\xc3("}}]}}',
    "html": b"<!DOCTYPE html><title>Login</title>",
    "half": b'{"references":{"documents":[{"content":"half of',
}
LYING_TEXTS = ("Infinitely good.", "Not a number.", "[alice/docs] says so.", "")


class Flapping(msgspec.Struct, kw_only=True):
    """A source that fails while `broken`; `calls` are when it was asked, and whether it was broken then."""

    source: object
    broken: bool = False
    token: None = None
    calls: int = 0

    async def answer(self, request: web.BaseRequest, body: bytes, dialect: EndpointKind) -> web.StreamResponse:
        self.calls += 1
        chosen = Failing(failure=Failure.STATUS_500) if self.broken else self.source
        reply: web.StreamResponse = await chosen.answer(request, body, dialect)  # type: ignore[attr-defined]
        return reply


class Upstreams:
    """A Space with a good source (`docs`), one for each failure, and models that answer each question differently."""

    def __init__(self, space: Space, history: HistoryFile) -> None:
        self.space = space
        self._history = history
        self.documents("docs", RIVERS)

    def documents(self, slug: str, found: Sequence[Document]) -> None:
        self.space.source(slug, documents=found)
        self.sent(slug, [one.content for one in found])

    def sent(self, slug: str, texts: Sequence[str]) -> None:
        self._history.record("sent", source=f"{OWNER}/{slug}", texts=list(texts))

    def large(self, slug: str, *, count: int, size_bytes: int) -> None:
        self.documents(slug, documents(slug, count=count, size_bytes=size_bytes))

    def lies(self) -> list[str]:
        """Slugs of sources that lie. Their texts are theirs to send."""
        for name, body in LIES.items():
            self.space.fails(f"lie-{name}", Failure.BAD_JSON, body=body)
            self.sent(f"lie-{name}", LYING_TEXTS)
        return [f"lie-{name}" for name in LIES]

    def model(self, slug: str, *, words: int, every_s: float) -> None:
        """Says so many words to each question, one at a time."""
        self.space.model(slug, reply=self._reply(words), chunk_delay_s=every_s)

    def _reply(self, words: int) -> Callable[[Sequence[Message]], str]:
        def reply(messages: Sequence[Message]) -> str:
            prompt = next(message.content for message in reversed(messages) if message.role == "user")
            found = NUMBER.findall(prompt)
            number = found[-1] if found else "unknown"
            text = " ".join([f"Answer {number}", *_words(words), "[alice/docs]."])
            self._history.record("said", question=number, text=text)
            return text

        return reply

    def ref(self, slug: str, *, kind: str = "space") -> Ref:
        return {"url": self.space.url, "slug": slug, "owner_username": OWNER, "kind": kind}

    def writer(self, slug: str = "writer") -> Ref:
        return self.ref(slug, kind="openai")

    def flapping(self, slug: str) -> Flapping:
        made = Flapping(source=self.space._endpoints["docs"])
        self.space._endpoints[slug] = made  # type: ignore[assignment]
        self.sent(slug, [one.content for one in RIVERS])
        return made


def _words(count: int) -> Iterator[str]:
    return (f"word{number}" for number in itertools.islice(itertools.count(1), count))
