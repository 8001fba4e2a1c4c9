"""Documents as they arrive: as JSON, or as files in a form."""

import asyncio
import binascii
from base64 import b64decode
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Receive

from anabranch.configuration.settings import Settings
from anabranch.domain.errors import InvalidQuestion, UpstreamError
from anabranch.entrypoints.http import knowledge_wire as wire
from anabranch.entrypoints.http.knowledge_errors import Gone, RequestTimedOut, RequestTooLarge, body_of
from anabranch.knowledge.model import NewDocument
from anabranch.network.urls import parse

T = TypeVar("T")

# A document in base64 takes four bytes for three, and something stands around it.
IN_BASE64 = 1.4
AROUND = 1024 * 1024
ARRIVAL_S = 600.0
MAX_FILES = 1_000
MAX_FIELDS = 20
SPACE = str.maketrans("", "", " \t\r\n")
# From about here on, decoding would hold the event loop up.
LARGE = 256 * 1024

decode = msgspec.json.Decoder(wire.IngestRequest).decode


class Arrival(NamedTuple):
    collection: str
    documents: list[NewDocument]
    chunking: dict[str, Any]


async def arrival(request: Request, settings: Settings) -> Arrival:
    """What an ingest request brings."""
    limit = int(settings.max_document_bytes * IN_BASE64) + AROUND
    if request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        arrived = await _from_form(request, limit)
    else:
        body = await body_of(request.receive, limit, ARRIVAL_S)
        arrived = await asyncio.to_thread(_from_json, body) if len(body) > LARGE else _from_json(body)
    _check_sizes(arrived.documents, settings.max_document_bytes)
    return arrived


def _from_json(body: bytes) -> Arrival:
    asked = decode(body)
    documents = [_document(one, f"documents[{number}]") for number, one in enumerate(asked.documents)]
    return Arrival(asked.collection_id, documents, (asked.settings or wire.ChunkingForm()).given())


def _document(form: wire.DocumentForm, where: str) -> NewDocument:
    source = form.source
    made = NewDocument(
        source=source.type,
        filename=source.filename,
        title=form.title,
        metadata=wire.check_metadata(form.metadata, f"{where}.metadata"),
        permissions=form.permissions.value() if form.permissions is not None else None,
        identity=form.id,
    )
    match source.type:
        case "text":
            return msgspec.structs.replace(made, data=source.content.encode())
        case "file":
            return msgspec.structs.replace(made, data=_decoded(source.content, f"{where}.source.content"))
        case "url":
            return msgspec.structs.replace(made, url=_address(source.content, f"{where}.source.content"))


def _decoded(content: str, where: str) -> bytes:
    try:
        return b64decode(content.translate(SPACE), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidQuestion(f"{where} is not base64; send a text as it is, with type text.") from None


def _address(content: str, where: str) -> str:
    address = content.strip()
    try:
        parse(address)
    except UpstreamError as error:
        raise InvalidQuestion(f"{where} cannot be fetched. {error.message}") from None
    return address


async def _from_form(request: Request, limit: int) -> Arrival:
    pieces = _pieces(request.receive, limit)
    parser = MultiPartParser(request.headers, pieces, max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=AROUND)
    try:
        async with asyncio.timeout(ARRIVAL_S):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidQuestion(f"The form cannot be read. {error.message}") from None
    except TimeoutError:
        raise RequestTimedOut("The request took too long to arrive.") from None
    try:
        return await _filled_in(form)
    finally:
        await form.close()


async def _pieces(receive: Receive, limit: int) -> AsyncGenerator[bytes, None]:
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise RequestTooLarge(f"The request is larger than {limit:,} bytes.")
        yield piece
        if not message.get("more_body", False):
            return


async def _filled_in(form: FormData) -> Arrival:
    files = [one for _, one in form.multi_items() if isinstance(one, UploadFile) and (one.filename or one.size)]
    if not files:
        raise InvalidQuestion("The form holds no file; send one or more as files.")
    collection = _said(form, "collection_id", str)
    if not collection:
        raise InvalidQuestion("The form needs collection_id, a collection's id or name.")
    metadata = wire.check_metadata(_said(form, "metadata", dict[str, Any]), "metadata")
    permissions = _said(form, "permissions", wire.PermissionsForm)
    chunking = _said(form, "settings", wire.ChunkingForm)
    documents = [
        NewDocument(
            source="file",
            data=await one.read(),
            filename=_name(one.filename),
            media_type=one.content_type,
            metadata=metadata,
            permissions=permissions.value() if permissions is not None else None,
        )
        for one in files
    ]
    return Arrival(collection, documents, (chunking or wire.ChunkingForm()).given())


def _said(form: FormData, name: str, kind: type[T]) -> T | None:
    """A field of the form: a text, or JSON of some kind."""
    value = form.get(name)
    if not isinstance(value, str) or not value.strip():
        return None
    if kind is str:
        return value.strip()  # type: ignore[return-value]
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidQuestion(f"{name} is not valid: {error}") from None


def _name(filename: str | None) -> str | None:
    if filename is not None and len(filename) > 500:
        raise InvalidQuestion("A file's name has more than 500 characters.")
    return filename or None


def _check_sizes(documents: Sequence[NewDocument], most: int) -> None:
    for number, document in enumerate(documents):
        if len(document.data) > most:
            name = document.filename or f"documents[{number}]"
            raise RequestTooLarge(f"{name} is larger than {most:,} bytes (AGGREGATOR_MAX_DOCUMENT_BYTES).")
