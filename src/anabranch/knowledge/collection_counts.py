"""How much of a collection a caller can see."""

from anabranch.domain.model import Value
from anabranch.knowledge.index.catalog import Catalog
from anabranch.knowledge.model import Caller, Collection
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import Session

# In the index: a chunk's key and length; its vector in 32 bits, 8 bits and 1 bit per number; a posting per word.
INDEX_BYTES_PER_CHUNK = 12
INDEX_BYTES_PER_NUMBER = 5.125
INDEX_BYTES_PER_TOKEN = 6


class CollectionCounts(Value):
    """A collection, and how much of it a caller can see."""

    collection: Collection
    documents: int
    chunks: int
    tokens: int
    size: int
    stored_bytes: int
    dimensions: int

    @property
    def storage_bytes(self) -> int:
        """The text and vectors in the records, and the share of the index: an estimate from the caller's own documents,
        because the size of the shared files would disclose how much others have."""
        per_chunk = INDEX_BYTES_PER_CHUNK + self.dimensions * INDEX_BYTES_PER_NUMBER
        return self.stored_bytes + round(self.chunks * per_chunk) + self.tokens * INDEX_BYTES_PER_TOKEN


def counts(db: Session, catalog: Catalog, caller: Caller, name: str | None = None) -> list[CollectionCounts]:
    """The collections with this id or name, or all that the caller can see, with their counts."""
    _, dimensions = documents.embedder(db) or ("", 0)
    found = catalog.visible(caller) if name is None else catalog.named((name,), caller)
    return [
        CollectionCounts(collection=one, dimensions=dimensions, **catalog.totals(one.key, caller)._asdict())
        for one in found
    ]
