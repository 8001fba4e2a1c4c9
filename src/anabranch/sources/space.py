"""A SyftAI-Space data source."""

import json
import math
from typing import Any

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import Trouble, UpstreamError, UpstreamTimedOut
from anabranch.domain.model import Context, Endpoint, Passage, Query, SourceReply, Status, Value
from anabranch.network import syft_wire

MAX_DOCUMENTS = 1_000


class Labels(Value):
    title: str | int | float | None = None
    file_name: str | int | float | None = None
    filename: str | int | float | None = None


class SpaceDocument(Value):
    content: str | None = None
    document_id: str | int | None = None
    metadata: Labels | None = None
    similarity_score: float | None = None


class References(Value):
    documents: list[SpaceDocument] | None = None


class QueryReply(Value):
    references: References | msgspec.UnsetType | None = msgspec.UNSET
    summary: syft_wire.Summary | str | msgspec.UnsetType | None = msgspec.UNSET


decode_strictly = msgspec.json.Decoder(QueryReply).decode


def decode(body: bytes) -> QueryReply:
    """A reply in its documented form; or, where that fails, what can be made of it: documents that cannot be read are
    passed over, and so are odd numbers, halves of characters and byte-order marks that JSON proper does not have."""
    try:
        return decode_strictly(body)
    except msgspec.DecodeError:
        return _salvaged(json.loads(body.decode("utf-8-sig")))


def _salvaged(reply: Any) -> QueryReply:
    found = _of(reply, "references", dict)
    documents = _of(found, "documents", list)
    if documents is None:
        # Nothing to salvage: say what is wrong with the form.
        return msgspec.convert(reply, QueryReply)
    read = [document for given in documents if (document := _document(given)) is not None]
    if documents and not read:
        raise msgspec.ValidationError("none of its documents can be read")
    spoken = _of(_of(_of(reply, "summary", dict), "message", dict), "content", str)
    summary = syft_wire.Summary(message=syft_wire.SpaceMessage(content=_whole(spoken))) if spoken else None
    return QueryReply(references=References(documents=read), summary=summary)


def _document(given: object) -> SpaceDocument | None:
    content = _of(given, "content", str)
    if not content:
        return None
    labels = _of(given, "metadata", dict) or {}
    named = {name: _whole(str(labels[name])) for name in Labels.__struct_fields__ if _is_label(labels.get(name))}
    score = _of(given, "similarity_score", int | float)
    identity = _of(given, "document_id", str | int)
    return SpaceDocument(
        content=_whole(content),
        document_id=None if identity is None else _whole(str(identity)),
        metadata=Labels(**named),
        similarity_score=score if score is None or isinstance(score, float) else float(max(0, min(score, 1))),
    )


def _of(holder: object, name: str, kind: Any) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, kind) else None


def _is_label(value: object) -> bool:
    return isinstance(value, str | int | float)


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()


class SpaceSource:
    """Asks one data source; what it returns becomes passages, what it refuses becomes a status and a sentence."""

    def __init__(self, endpoint: Endpoint, outbound: Outbound) -> None:
        self._endpoint = endpoint
        self._outbound = outbound

    async def search(self, query: Query, context: Context) -> SourceReply:
        payload = {
            "messages": query.text,
            "limit": query.limit,
            "similarity_threshold": query.similarity_threshold,
            "include_metadata": True,
        }
        try:
            async with syft_wire.call(self._endpoint, payload, context, self._outbound) as exchange:
                if not 200 <= exchange.status < 300:
                    return self._failed(*await syft_wire.refusal(exchange), syft_wire.trouble(exchange.status))
                body = await exchange.read()
        except UpstreamError as error:
            status = Status.TIMEOUT if isinstance(error, UpstreamTimedOut) else Status.ERROR
            return self._failed(status, error.message, error.trouble)
        try:
            reply = decode(body)
        except msgspec.ValidationError as error:
            return self._unusable(f"The reply does not have the expected form: {error}.")
        except (ValueError, RecursionError):
            what = "an HTML page" if exchange.content_type == "text/html" else "something else"
            return self._unusable(f"The reply should be JSON, but it is {what}.")
        if reply.references is msgspec.UNSET and reply.summary is msgspec.UNSET:
            return self._unusable("The reply holds neither documents nor a summary.")
        return SourceReply(path=self._endpoint.path, status=Status.SUCCESS, passages=self._passages(reply))

    def _passages(self, reply: QueryReply) -> tuple[Passage, ...]:
        path = self._endpoint.path
        documents = (reply.references.documents if isinstance(reply.references, References) else None) or []
        documents = documents[:MAX_DOCUMENTS]
        passages = [
            Passage(
                source=path,
                title=_title(document, number),
                text=document.content,
                score=_score(document.similarity_score),
                document_id=None if document.document_id is None else str(document.document_id),
            )
            for number, document in enumerate(documents, 1)
            if document.content
        ]
        summary = _spoken(reply.summary)
        if summary:
            best = max((passage.score for passage in passages), default=1.0)
            title = f"{self._endpoint.name or path}: summary"
            passages.insert(0, Passage(source=path, title=title, text=summary, score=best))
        return tuple(passages)

    def _failed(self, status: Status, error: str, trouble: Trouble) -> SourceReply:
        return SourceReply(path=self._endpoint.path, status=status, error=error, fault=trouble.fault)

    def _unusable(self, error: str) -> SourceReply:
        return self._failed(Status.ERROR, error, Trouble.UNUSABLE)


def _title(document: SpaceDocument, number: int) -> str:
    labels = document.metadata
    if labels is not None:
        for label in (labels.title, labels.file_name, labels.filename):
            if label is not None and str(label).strip():
                return str(label).strip()
    return f"Document {number}" if document.document_id is None else str(document.document_id)


def _score(score: float | None) -> float:
    return min(1.0, max(0.0, score)) if score is not None and math.isfinite(score) else 0.0


def _spoken(summary: syft_wire.Summary | str | msgspec.UnsetType | None) -> str | None:
    if isinstance(summary, syft_wire.Summary):
        return summary.message.content if summary.message else None
    return summary if isinstance(summary, str) else None
