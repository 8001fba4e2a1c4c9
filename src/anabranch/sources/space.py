"""A SyftAI-Space data source."""

import json
import math
from typing import Any

import msgspec

from anabranch.domain.contracts import Outbound
from anabranch.domain.errors import FailureKind, LimitReached, Overloaded, UpstreamError, UpstreamTimedOut
from anabranch.domain.model import Context, Endpoint, Passage, Query, SourceReply, Status, Value
from anabranch.domain.shares import reply_memory
from anabranch.network import syft_wire
from anabranch.network.large_json import LARGE_BYTES, decoded

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
    """A reply in its documented form. If that fails, a lenient decoding: it skips unreadable documents and accepts
    NaN, lone surrogates and byte order marks."""
    try:
        return decode_strictly(body)
    except msgspec.DecodeError:
        return _decode_leniently(json.loads(body.decode("utf-8-sig")))


def _decode_leniently(reply: Any) -> QueryReply:
    documents = _get(_get(reply, "references", dict), "documents", list)
    if documents is None:
        # No documents: raise the error that names the wrong field.
        return msgspec.convert(reply, QueryReply)
    decoded = [document for given in documents if (document := _document(given)) is not None]
    if documents and not decoded:
        raise msgspec.ValidationError("none of its documents can be read")
    text = _get(_get(_get(reply, "summary", dict), "message", dict), "content", str)
    summary = syft_wire.Summary(message=syft_wire.SpaceMessage(content=_encodable(text))) if text else None
    return QueryReply(references=References(documents=decoded), summary=summary)


def _document(given: object) -> SpaceDocument | None:
    content = _get(given, "content", str)
    if not content:
        return None
    labels = _get(given, "metadata", dict) or {}
    named = {
        name: _encodable(str(labels[name]))
        for name in Labels.__struct_fields__
        if isinstance(labels.get(name), str | int | float)
    }
    score, identity = _get(given, "similarity_score", int | float), _get(given, "document_id", str | int)
    return SpaceDocument(
        content=_encodable(content),
        document_id=None if identity is None else _encodable(str(identity)),
        metadata=Labels(**named),
        similarity_score=score if score is None or isinstance(score, float) else float(max(0, min(score, 1))),
    )


def _get(holder: object, name: str, kind: Any) -> Any:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, kind) else None


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


class SpaceSource:
    """Searches one data source. Documents become passages; failures become a status and a message."""

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
                    status, message = await syft_wire.refusal(exchange)
                    if exchange.status == 401 and context.may_know_address(self._endpoint):
                        message = syft_wire.with_hint(message, syft_wire.key_needed(self._endpoint))
                    return self._failed(status, message, syft_wire.failure_kind(exchange.status))
                body = await exchange.read(reply_memory.get())
        except UpstreamError as error:
            status = Status.TIMEOUT if isinstance(error, UpstreamTimedOut) else Status.ERROR
            message = error.described(with_address=context.may_know_address(self._endpoint))
            return self._failed(status, message, error.failure_kind)
        except (LimitReached, Overloaded) as error:
            return self._failed(Status.ERROR, error.message, FailureKind.REQUEST)
        try:
            reply = decode(body) if len(body) <= LARGE_BYTES else await decoded(body, decode)
        except UpstreamError as error:
            return self._unusable(error.message)
        except msgspec.ValidationError as error:
            return self._unusable(f"The reply does not have the expected form: {error}.")
        except (ValueError, RecursionError):
            is_html = exchange.content_type == "text/html"
            return self._unusable(
                f"The reply should be JSON, but it is {'an HTML page' if is_html else 'something else'}."
            )
        if reply.references is msgspec.UNSET and reply.summary is msgspec.UNSET:
            return self._unusable("The reply has neither documents nor a summary.")
        return SourceReply(path=self._endpoint.path, status=Status.SUCCESS, passages=self._passages(reply))

    def _passages(self, reply: QueryReply) -> tuple[Passage, ...]:
        path = self._endpoint.path
        documents = (reply.references.documents if isinstance(reply.references, References) else None) or []
        passages = [
            Passage(
                source=path,
                title=_title(document, number),
                text=document.content,
                score=_score(document.similarity_score),
                document_id=None if document.document_id is None else str(document.document_id),
            )
            for number, document in enumerate(documents[:MAX_DOCUMENTS], 1)
            if document.content
        ]
        summary = _summary_text(reply.summary)
        if summary:
            title = f"{self._endpoint.name or path}: summary"
            score = max((passage.score for passage in passages), default=1.0)
            passages.insert(0, Passage(source=path, title=title, text=summary, score=score))
        return tuple(passages)

    def _failed(self, status: Status, error: str, failure_kind: FailureKind) -> SourceReply:
        return SourceReply(path=self._endpoint.path, status=status, error=error, fault=failure_kind.fault)

    def _unusable(self, error: str) -> SourceReply:
        return self._failed(Status.ERROR, error, FailureKind.UNUSABLE)


def _title(document: SpaceDocument, number: int) -> str:
    labels = document.metadata
    if labels is not None:
        for label in (labels.title, labels.file_name, labels.filename):
            if label is not None and (title := str(label).strip()):
                return title
    return f"Document {number}" if document.document_id is None else str(document.document_id)


def _score(score: float | None) -> float:
    return min(1.0, max(0.0, score)) if score is not None and math.isfinite(score) else 0.0


def _summary_text(summary: syft_wire.Summary | str | msgspec.UnsetType | None) -> str | None:
    if isinstance(summary, syft_wire.Summary):
        return summary.message.content if summary.message else None
    return summary if isinstance(summary, str) else None
