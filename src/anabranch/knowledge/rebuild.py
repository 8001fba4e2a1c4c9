"""Re-embedding: every chunk is embedded again, and all vectors are replaced in one transaction."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from anabranch.domain.contracts import Embedder
from anabranch.domain.errors import AnabranchError, ConfigurationError
from anabranch.knowledge.index.manifest import Generations, IndexManifest
from anabranch.knowledge.records import documents, embeddings
from anabranch.knowledge.records.database import Database

BATCH = 256

Progress = Callable[[int, int], None]


async def reembed(
    database: Database, embedder: Embedder, generations: Generations, progress: Progress, *, batch_size: int = BATCH
) -> int:
    """Embed every chunk with another embedder; returns their number. The caller holds the indexer lock and rebuilds the
    index afterwards: it is empty. Killed at any moment, this leaves the old vectors or the new ones, never both, and
    never an index of one beside records of the other."""
    _, total = database.reading(documents.counts)
    _check_lengths(database, embedder, batch_size)
    database.writing(embeddings.begin_replacement)
    done = 0
    try:
        for batch in _batches(database, batch_size):
            embedded = await embedder.embed([text for _, text in batch])
            rows = [(key, one.vector, one.tokens) for (key, _), one in zip(batch, embedded, strict=True)]
            database.writing(partial(embeddings.add_replacements, rows=rows))
            done += len(batch)
            progress(done, total)
        # The index goes first, because it holds the old vectors: without one, searches read the records.
        generations.publish(IndexManifest(number=generations.current().number))
        database.writing(lambda db: embeddings.swap_in_replacement(db, embedder.name))
    except BaseException:
        with suppress(AnabranchError):
            database.writing(embeddings.drop_replacement)
        raise
    return done


def _check_lengths(database: Database, embedder: Embedder, batch_size: int) -> None:
    """A chunk that the embedder would truncate could not be found by its end."""
    too_long = sum(
        len(embedder.tokens(text)) > embedder.window for batch in _batches(database, batch_size) for _, text in batch
    )
    if too_long:
        raise ConfigurationError(
            f"{too_long:,} chunks are longer than the {embedder.window:,} tokens that {embedder.name!r} accepts. Set "
            f"the embedder back and ingest their documents again with a smaller --chunk-size, then rebuild."
        )


def _batches(database: Database, size: int) -> Iterator[list[tuple[int, str]]]:
    last = 0
    while batch := database.reading(partial(documents.chunk_texts, after=last, limit=size)):
        yield batch
        last = batch[-1][0]
