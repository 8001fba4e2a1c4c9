"""Collections, documents and jobs in spec 5's form, as far as a caller is to see them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import UNSET

from anabranch.entrypoints.http.knowledge_wire import (
    CollectionSettingsView,
    CollectionView,
    DocumentSourceView,
    DocumentView,
    JobDocument,
    JobView,
    PermissionsForm,
    Progress,
    RequestedChunking,
)
from anabranch.knowledge.model import Caller, Collection, Document, Item, Job, Permissions
from anabranch.knowledge.text import Chunking

if TYPE_CHECKING:  # it brings numpy along
    from anabranch.knowledge.room import Counted


def collection(counted: "Counted", caller: Caller) -> CollectionView:
    one = counted.collection
    settings, asked = one.settings, one.settings.requested
    return CollectionView(
        id=one.id,
        name=one.name,
        description=one.description,
        owner=one.owner or None,
        settings=CollectionSettingsView(
            embedding_model=settings.embedding_model,
            chunking_strategy=settings.chunking.strategy,
            chunk_size=settings.chunking.size,
            chunk_overlap=settings.chunking.overlap,
            requested=_requested(asked) if asked is not None else None,
            default_permissions=_permissions(settings.default_permissions) if caller.owns(one.owner) else None,
        ),
        document_count=counted.documents,
        chunk_count=counted.chunks,
        created_at=_moment(one.created_at),
    )


def job(found: Job) -> JobView:
    return JobView(
        job_id=found.id,
        collection_id=found.collection_id,
        status=found.status,
        progress=Progress(total=found.total, processed=found.processed, failed=found.failed),
        documents=[_item(item) for item in found.items],
        created_at=_moment(found.created_at),
        completed_at=_moment(found.completed_at) if found.completed_at is not None else None,
    )


def document(found: Document, where: Collection, caller: Caller) -> DocumentView:
    return DocumentView(
        id=found.id,
        collection_id=where.id,
        collection=where.name,
        title=found.title,
        source=DocumentSourceView(type=found.source, filename=found.filename, url=found.url),
        metadata=dict(found.metadata),
        permissions=_permissions(found.permissions) if caller.owns(found.owner) else None,
        content_hash=found.content_hash,
        chunk_count=found.chunk_count,
        token_count=found.tokens,
        size_bytes=found.size,
        pages=found.pages,
        created_at=_moment(found.created_at),
        updated_at=_moment(found.updated_at),
    )


def _requested(chunking: Chunking) -> RequestedChunking:
    return RequestedChunking(chunk_size=chunking.size, chunk_overlap=chunking.overlap)


def _item(item: Item) -> JobDocument:
    return JobDocument(
        id=item.document_id,
        name=item.name,
        status=item.status,
        outcome=item.outcome,
        chunk_count=item.chunk_count,
        error=item.error if item.error is not None else UNSET,
        code="UNPROCESSABLE" if item.status == "failed" else UNSET,
    )


def _permissions(permissions: Permissions) -> PermissionsForm:
    return PermissionsForm(
        visibility=permissions.visibility,
        allowed_users=list(permissions.allowed_users),
        allowed_groups=list(permissions.allowed_groups),
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
