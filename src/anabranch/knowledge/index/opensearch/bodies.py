"""What is sent to OpenSearch: the mapping, a chunk as it is indexed, and a search."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.domain.model import Filters
from anabranch.knowledge.index.catalog import attributes_of
from anabranch.knowledge.index.permission_classes import indexed_readers
from anabranch.knowledge.index.reader import terms_of
from anabranch.knowledge.index.view import Elsewhere
from anabranch.knowledge.records import documents
from anabranch.knowledge.records.database import ResultRow
from anabranch.knowledge.records.index_position import LastChange
from anabranch.text.words import terms

# Of a text, so many different terms are searched for: OpenSearch refuses queries of more than 1,024.
MAX_TERMS = 500
# Lists are longer by this: what they hold may have been deleted since.
SPARE = 10
MAX_LISTED = 65_000
# A numpy float of 32 bits has no more digits.
DIGITS = 7
POSITION = "position"
WRITTEN = ("seq", "at")

Lines = Iterator[Mapping[str, Any]]


def settings(shards: int, replicas: int) -> Mapping[str, Any]:
    """Changes can be found after a refresh, for which the writer asks. A merge drops all that is deleted."""
    return {
        "index": {
            "number_of_shards": shards,
            "number_of_replicas": replicas,
            "refresh_interval": -1,
            "knn": True,
            "knn.derived_source.enabled": False,
            "merge.policy.expunge_deletes_allowed": 0,
            # What a writer sends that was paused does not bring back what was deleted meanwhile.
            "gc_deletes": "1h",
        }
    }


def alias_of(name: str) -> str:
    """The name under which an index is written: OpenSearch makes an index of whatever is written to a name that it does
    not know, but no alias."""
    return f"{name}.write"


def mapping(dimensions: int) -> Mapping[str, Any]:
    """Nothing is kept but what is searched: texts and vectors come from the records."""
    keyword = {"type": "keyword", "doc_values": False}
    method = {"name": "hnsw", "engine": "lucene", "space_type": "innerproduct"}
    return {
        "dynamic": "strict",
        "_source": {"enabled": False},
        "properties": {
            "document": {"type": "long"},
            "collection": {"type": "integer"},
            "readers": keyword,
            "kind": keyword,
            "day": {"type": "integer", "doc_values": False},
            "attributes": keyword,
            "terms": {"type": "text", "analyzer": "whitespace", "index_options": "freqs"},
            "length": {"type": "integer", "index": False},
            "vector": {"type": "knn_vector", "dimension": dimensions, "method": method},
            "seq": {"type": "long", "index": False, "store": True},
            "at": {"type": "double", "index": False, "store": True},
        },
    }


def chunks(
    index: str,
    version: int,
    rows: Sequence[ResultRow],
    stored: Mapping[int, ResultRow],
    named: Mapping[int, Sequence[tuple[str, str]]],
) -> Lines:
    """The lines of a bulk request for some chunks: `stored` are the rows of their documents, `named` their attributes.
    An older version does not replace a newer one, whoever writes it last."""
    of_documents = {key: _of_document(row, named.get(key, ())) for key, row in stored.items()}
    for row in rows:
        words = terms_of(row)
        identity = {"_index": alias_of(index), "_id": str(row["key"]), "require_alias": True}
        yield {"index": {**identity, "version": version, "version_type": "external_gte"}}
        yield {
            **of_documents[row["document"]],
            "kind": row["kind"],
            "terms": " ".join(map(_term, words)),
            "length": len(words),
            "vector": _numbers(np.frombuffer(row["vector"], np.float32)),
        }


def _of_document(row: ResultRow, named: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
    return {
        "document": row["key"],
        "collection": row["collection"],
        "readers": sorted(indexed_readers(row["owner"], documents.permissions_of(row), row["collection"])),
        "day": row["day"],
        "attributes": [_attribute(*pair) for pair in named],
    }


class Counts(NamedTuple):
    """What was counted for a search: among the chunks that the caller may find, and in all of the index how many chunks
    there are, and how many have each term. And what the index says of itself."""

    findable: Elsewhere
    rows: int
    counts: Mapping[int, int]
    last_change: LastChange | None


class Search(NamedTuple):
    """One question as requests. The first one has the lists of the chunks that are nearest to each vector, and what is
    counted; the second one a list by words for each text, which needs the counts."""

    name: str
    permitted: Mapping[str, Any]
    vectors: Sequence[NDArray[np.float32]]
    texts: Sequence[Sequence[int]]
    limit: int

    @property
    def terms(self) -> list[int]:
        return list(dict.fromkeys(term for text in self.texts for term in text))

    def near(self) -> Lines:
        having = [{"term": {"terms": _term(term)}} for term in self.terms]
        terms = {"terms": {"filters": {"filters": having}}} if having else {}
        for vector in self.vectors:
            yield {"index": self.name}
            near = {"vector": _numbers(vector), "k": self.limit + SPARE, "filter": self.permitted}
            yield {**self._listed, "query": {"knn": {"vector": near}}}
        # The same request for everything that a caller asks, so that OpenSearch keeps its result until a refresh.
        yield {"index": self.name}
        words = {"words": {"sum": {"field": "length"}}}
        yield {"size": 0, "track_total_hits": True, "query": self.permitted, "aggs": words}
        yield {"index": self.name}
        yield {"size": 0, "track_total_hits": False, "query": self.permitted, "aggs": terms}
        yield {"index": self.name}
        yield {"size": 0, "track_total_hits": True, "aggs": terms}
        yield {"index": self.name}
        position = {"query": {"ids": {"values": [POSITION]}}, "stored_fields": WRITTEN}
        yield {"size": 1, "_source": False, "track_total_hits": False, **position}

    def counted(self, replies: Sequence[Mapping[str, Any]]) -> Counts:
        findable, terms, everything, position = replies[len(self.vectors) :]
        return Counts(
            findable=Elsewhere(
                rows=findable["hits"]["total"]["value"],
                words=int(findable["aggregations"]["words"]["value"]),
                counts=self._counts(terms),
            ),
            rows=everything["hits"]["total"]["value"],
            counts=self._counts(everything),
            last_change=next(map(written_of, position["hits"]["hits"]), None),
        )

    def by_words(self, counts: Counts) -> Lines:
        """Each term weighs as much as its rarity among what the caller may find: which chunks are listed discloses
        nothing about others. OpenSearch weighs it by its rarity in all of the index, so that is divided by."""
        weights = {
            term: _rarity(counts.findable.rows, count) / _rarity(counts.rows, counts.counts[term])
            for term, count in counts.findable.counts.items()
            if count
        }
        for text in self.texts:
            if found := [term for term in text if term in weights]:
                wanted = [{"term": {"terms": {"value": _term(term), "boost": weights[term]}}} for term in found]
                yield {"index": self.name, "search_type": "dfs_query_then_fetch"}
                yield {
                    **self._listed,
                    "query": {"bool": {"filter": [self.permitted], "must": [{"bool": {"should": wanted}}]}},
                }

    @property
    def _listed(self) -> Mapping[str, Any]:
        return {"_source": False, "track_total_hits": False, "size": self.limit + SPARE}

    def _counts(self, reply: Mapping[str, Any]) -> dict[int, int]:
        buckets = reply.get("aggregations", {}).get("terms", {}).get("buckets", ())
        return dict(zip(self.terms, (one["doc_count"] for one in buckets), strict=True))


def keys_in(replies: Iterable[Mapping[str, Any]]) -> set[int]:
    """The keys of the chunks in some lists."""
    return {int(hit["_id"]) for one in replies for hit in one["hits"]["hits"]}


def _rarity(rows: int, count: int) -> float:
    """The inverse document frequency, as OpenSearch computes it."""
    rows = max(rows, count)
    return math.log(1 + (rows - count + 0.5) / (count + 0.5))


def written_of(position: Mapping[str, Any]) -> LastChange | None:
    """What the document of an index says that has its position; None if it does not say it."""
    fields = position.get("fields", {})
    if not {"seq", "at"} <= fields.keys():
        return None
    return LastChange(int(fields["seq"][0]), float(fields["at"][0]) or None)


def is_partial(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a part of the index did not answer."""
    return any(one["_shards"]["failed"] or one["timed_out"] for one in replies)


def words_of(text: str) -> list[int]:
    """The first different terms of a text."""
    return list(islice(dict.fromkeys(terms(text)), MAX_TERMS))


def permitted(
    filters: Filters, readers: Sequence[str], collections: Sequence[int] | None, without: Sequence[int]
) -> Mapping[str, Any]:
    """What chunks must have: one of the readers and, if they are given, of the collections; and they are of none of the
    documents that have changed since."""
    required: list[Mapping[str, Any]] = [_one_of("readers", readers)]
    if collections is not None:
        required.append(_one_of("collection", collections))
    if filters.chunk_types:
        required.append({"terms": {"kind": list(filters.chunk_types)}})
    if days := _days(filters):
        required.append({"range": {"day": days}})
    required += [{"term": {"attributes": _attribute(*wanted)}} for wanted in attributes_of(filters)]
    changed = {"must_not": [_one_of("document", without)]} if without else {}
    return {"bool": {"filter": required, **changed}}


def _one_of(field: str, values: Sequence[Any]) -> Mapping[str, Any]:
    """OpenSearch refuses longer lists."""
    parts = [{"terms": {field: list(values[at : at + MAX_LISTED])}} for at in range(0, len(values) or 1, MAX_LISTED)]
    return parts[0] if len(parts) == 1 else {"bool": {"should": parts}}


def _days(filters: Filters) -> Mapping[str, int]:
    ends = (("gte", filters.start), ("lte", filters.end))
    return {name: date.fromisoformat(day).toordinal() for name, day in ends if day is not None}


def _term(term: int) -> str:
    return f"{term:x}"


def _attribute(name: str, value: str) -> str:
    return blake2b(f"{name}\0{value}".encode(), digest_size=12).hexdigest()


def _numbers(vector: NDArray[np.float32]) -> list[float]:
    found: list[float] = np.round(vector.astype(np.float64), DIGITS).tolist()
    return found
