"""Moves the records from one database to another, and compares the two.

Rows are copied in the order of their keys while the source is in use; the target notes with each batch how far each
table is. What has changed since is copied in one transaction beside which nothing else can write to the source."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.audit import AuditEntry
from anabranch.domain.errors import ConfigurationError, Conflict
from anabranch.domain.model import Value
from anabranch.knowledge.records import audit, embeddings
from anabranch.knowledge.records.consistency import unhurried
from anabranch.knowledge.records.database import Database, Session, StoreFailed, as_json, new_id
from anabranch.knowledge.records.facts import fact, forget_fact, set_fact
from anabranch.knowledge.records.moves import MOVED_TO, STATE

# In the target: the state of the move, and with `:TABLE` up to which key a table is copied. In the source: which move
# was begun, and where the records are now.
ORIGIN = "migration_source"
# Facts of one database or one node, by the beginning of their names.
NOT_COPIED = ("schema_version", "indexed_chunk", "settings", STATE, MOVED_TO)
COPIED_FACTS = " AND ".join(f"substr(name, 1, {len(one)}) != '{one}'" for one in NOT_COPIED)
DIGEST_BYTES = 16
KEYS_AT_ONCE = 20_000
MAX_SHOWN = 5

Row = tuple[Any, ...]
# Runs a function of a session of one of the two databases.
Reads = Callable[[Callable[[Session], Any]], Any]
# Shows the progress of a step with this name: it is told how much is done, and of how much.
Shows = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


class CopiedTable(NamedTuple):
    """A table with the columns that order its rows. `changing`: a row can become another one under its key. `upserted`:
    rows are replaced in place, because others refer to them or triggers write them. `prefilled`: a new database has
    rows in it."""

    name: str
    key: tuple[str, ...]
    changing: bool = False
    upserted: bool = False
    prefilled: bool = False
    # A column, and the table to whose key it refers.
    parent: tuple[str, str] | None = None


# A table comes after those to which its rows refer, and after those whose triggers write it.
TABLES = (
    CopiedTable("collections", ("key",), changing=True, upserted=True),
    CopiedTable("documents", ("key",), changing=True, parent=("collection", "collections")),
    CopiedTable("contents", ("document",)),
    CopiedTable("attributes", ("document", "name", "value")),
    CopiedTable("chunks", ("key",)),
    CopiedTable("embeddings", ("chunk",)),
    CopiedTable("changes", ("seq",)),
    CopiedTable("jobs", ("key",), changing=True, upserted=True),
    CopiedTable("items", ("key",), changing=True, parent=("job", "jobs")),
    CopiedTable("uploads", ("item",), changing=True),
    CopiedTable("queries", ("rowid",), changing=True),
    CopiedTable("query_collections", ("collection", "created_at", "query")),
    CopiedTable("query_counts", ("collection", "day", "user"), changing=True),
    CopiedTable("retrievals", ("query", "rank")),
    CopiedTable("responses", ("query",), changing=True),
    CopiedTable("citations", ("query", "ordinal")),
    CopiedTable("keys", ("id",), changing=True),
    CopiedTable("endpoints", ("owner", "slug"), changing=True),
    CopiedTable("erasures", ("key",), changing=True),
    CopiedTable("erased", ("erasure", "store"), changing=True),
    CopiedTable("backups", ("path",), changing=True),
    CopiedTable("audit_names", ("digest",)),
    CopiedTable("audit", ("seq",)),
    CopiedTable("audit_chain", ("anchor_seq", "anchor_hash", "head_seq", "head_hash"), prefilled=True),
    CopiedTable("facts", ("name",), changing=True, prefilled=True),
    CopiedTable("stored", ("owner",), changing=True, upserted=True, prefilled=True),
    CopiedTable("versions", ("collection",), changing=True, upserted=True, prefilled=True),
)
# What each database has for itself: its counters of keys, and the nodes that use it.
LEFT_OUT = ("nodes", "reserved")
# The tables that count their keys, with the key; of those that are reserved, PostgreSQL counts in a table.
COUNTED = {
    "collections": "key",
    "documents": "key",
    "chunks": "key",
    "changes": "seq",
    "jobs": "key",
    "items": "key",
    "queries": "rowid",
    "erasures": "key",
}
RESERVED = ("documents", "chunks")
# Large values that are compared by their hashes, which PostgreSQL can compute where they are.
HASHED = {"contents": ("content",), "chunks": ("text",), "embeddings": ("vector", "tokens"), "uploads": ("data",)}
# The columns of a table with their types.
COLUMNS = {
    "sqlite": "SELECT name, type FROM pragma_table_info(?)",
    "postgres": (
        "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
        "WHERE attrelid = CAST(? AS regclass) AND attnum > 0 AND NOT attisdropped"
    ),
}
TEXTS, BYTES = ("TEXT", "text"), ("BLOB", "bytea")
SEQUENCE = "CAST(pg_get_serial_sequence(?, ?) AS regclass)"
# The chain of the audit log as it was with an earlier newest record.
CHAIN_BEFORE = (
    "(SELECT anchor_seq, anchor_hash, CAST(? AS BIGINT) AS head_seq, "
    "coalesce((SELECT hash FROM audit WHERE seq = ?), anchor_hash) AS head_hash FROM audit_chain) AS audit_chain"
)


class RowBatch(NamedTuple):
    """How much is read or written at once: so many rows, and no further one after so many bytes."""

    rows: int = 2_000
    size: int = 8 * 1024 * 1024


class Places(NamedTuple):
    """What people call the source and the target, without passwords."""

    source: str
    target: str


class Origin(Value):
    """In the source: the move that was begun, and where to."""

    id: str
    target: str


class MoveState(Value):
    """In the target: how far a move is. `replaced_at` is the change with which another embedder had replaced the
    vectors when it began. `differing` are tables that were not equal at the end: the next time, every row of them is
    compared. `last_record` is the last record of the audit log that was copied, `names` are digests of names that the
    move has added to this log."""

    id: str
    begun_at: float
    replaced_at: int
    differing: tuple[str, ...] = ()
    completed_at: float | None = None
    last_record: int = 0
    names: tuple[str, ...] = ()


class TableComparison(Value):
    """A table in both databases: the number of its rows, and the sum of their digests. `differing` are the first keys
    of rows that are not equal."""

    table: str
    rows: int
    digest: str
    target_rows: int
    target_digest: str
    differing: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return (self.rows, self.digest) == (self.target_rows, self.target_digest)


class RecordsComparison(Value):
    """Both databases, table by table. `counters` are the tables of which the target would use keys again; `audit` is
    what is wrong with the audit log of the target. If the tables are equal, so it was in the source."""

    tables: tuple[TableComparison, ...]
    counters: tuple[str, ...] = ()
    audit: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.counters and all(one.is_equal for one in self.tables)

    @property
    def rows(self) -> dict[str, int]:
        return {one.table: one.rows for one in self.tables}


class Relation(NamedTuple):
    """What is read of a table, in the order of its key; the key is its first columns. Of `texts` and `blobs`, the
    columns of these types, those that are `hashed` are read as their hashes."""

    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    texts: frozenset[str]
    blobs: frozenset[str]
    table: str
    where: str = "TRUE"
    values: Row = ()
    hashed: tuple[str, ...] = ()

    @property
    def keys(self) -> "Relation":
        return self._replace(columns=self.key)

    @property
    def digests(self) -> "Relation":
        """The same for comparisons."""
        return self._replace(hashed=HASHED.get(self.name, ()))

    @property
    def is_one(self) -> str:
        """The condition that chooses a row by its key."""
        return " AND ".join(f"{name} = ?" for name in self.key)

    def read(self, column: str) -> str:
        """A column in PostgreSQL."""
        if column not in self.hashed:
            return column
        value = f"convert_to({column}, 'UTF8')" if column in self.texts else column
        return f"sha256({value}) AS {column}"

    def key_of(self, row: Row) -> Row:
        return row[: len(self.key)]


class Migration:
    """The move of the records from one database to another."""

    def __init__(self, source: Database, target: Database, places: Places, shows: Shows, batch: RowBatch) -> None:
        self._source = source
        self._target = target
        self._places = places
        self._shows = shows
        self._batch = batch
        self._relations = _relations(source.reading(_columns), target.reading(_columns))

    @property
    def state(self) -> MoveState | None:
        """How far the move is; None if none was begun."""
        return self._target.reading(_state)

    def begin(self) -> MoveState:
        """Begin the move, or continue an interrupted one. Conflict if the target holds anything else."""
        origin, state = self._source.reading(_origin), self.state
        if state is not None and (origin is None or state.id != origin.id):
            raise Conflict(
                f"{self._places.target} holds the move of other records, or of these to another place. Name an empty "
                "database or a new folder."
            )
        if state is not None:
            return state
        self._target.reading(self._check_empty)
        if origin is None or origin.target != self._places.target:
            origin = self._source.writing(partial(_note_origin, target=self._places.target))
        replaced_at = self._source.reading(embeddings.replaced_at)
        begun = MoveState(id=origin.id, begun_at=time.time(), replaced_at=replaced_at)

        def note(db: Session) -> None:
            self._check_empty(db)
            set_fact(db, STATE, as_json(begun))

        self._target.writing(note)
        return begun

    def _check_empty(self, db: Session) -> None:
        tables = (one.name for one in TABLES if not one.prefilled)
        held = [one for one in tables if db.execute(f"SELECT 1 FROM {one} LIMIT 1").fetchone()]  # noqa: S608  ours
        if held:
            raise Conflict(
                f"{self._places.target} holds records already ({', '.join(held[:MAX_SHOWN])}). Name an empty database "
                "or a new folder."
            )

    def copy(self) -> None:
        """Copy the rows whose keys come after those that are copied. The source may be in use."""
        for table in TABLES:
            if not table.prefilled:
                self._copy(table)

    def _copy(self, table: CopiedTable) -> None:
        of = self._relations[table.name]
        after = self._target.reading(partial(_copied_to, table=table.name))
        total = self._source.reading(partial(_extent, of=of))
        done = 0
        with self._shows(f"Copying {_title(table.name)}") as advance:
            while page := self._source.reading(partial(_page, of=of, after=after, batch=self._batch)):
                self._write(table.name, partial(_append, table=table, of=of, page=page, after=after))
                after, done = of.key_of(page[-1]), done + len(page)
                advance(_reached(page[-1], done), total)

    def _write(self, table: str, work: Callable[[Session], object]) -> None:
        try:
            self._target.writing(work)
        except StoreFailed as error:
            raise type(error)(f"{_title(table)} cannot be copied to {self._places.target}: {error.message}") from error

    def finish(self) -> RecordsComparison:
        """Copy what has changed meanwhile, compare all rows, and mark the move as complete if they are equal. Others
        cannot write to the source until then."""
        return self._source.writing(self._finished)

    def _finished(self, db: Session) -> RecordsComparison:
        _lock(db)
        state = self.state
        assert state is not None, "begun"
        if state.completed_at is not None:  # and the transaction was repeated since
            set_fact(db, MOVED_TO, self._places.target)
            return self._target.reading(lambda target: self._compared_at_once(db, target))
        suspect = set(state.differing)
        if embeddings.replaced_at(db) != state.replaced_at:
            suspect.add("embeddings")

        def read(work: Callable[[Session], Any]) -> Any:
            return work(db)

        for table in reversed(TABLES):
            self._delete_others(table, read, every_row=table.changing or table.name in suspect)
        for table in TABLES:
            self._insert_missing(table, read)
        self._target.writing(partial(_set_counters, counters=_counters(db)))
        compared = self._compared(read, self._target.reading, self._relations)
        if compared.is_equal:
            self._complete(db, state, compared)
            set_fact(db, MOVED_TO, self._places.target)
        else:
            differing = tuple(one.table for one in compared.tables if not one.is_equal)
            self._target.writing(partial(_note_state, state=msgspec.structs.replace(state, differing=differing)))
        return compared

    def _delete_others(self, table: CopiedTable, read: Reads, *, every_row: bool) -> None:
        """Delete what the source does not have, or has otherwise. All of it goes before anything is inserted: another
        row may have its name."""
        of = self._relations[table.name]
        compared = of.digests if every_row else of.keys
        others = (
            compared.key_of(there)
            for here, there in self._differing(compared, read, f"Comparing {_title(table.name)}")
            if there is not None and (here is None or not table.upserted)
        )
        for keys in _batches(others, self._batch):
            self._write(table.name, partial(_delete, of=of, keys=keys))

    def _insert_missing(self, table: CopiedTable, read: Reads) -> None:
        of = self._relations[table.name]
        compared = of.digests if table.upserted else of.keys
        missing = (
            read(partial(_row, of=of, key=compared.key_of(here)))
            for here, _ in self._differing(compared, read, f"Completing {_title(table.name)}")
            if here is not None
        )
        for rows in _batches(missing, self._batch):
            self._write(table.name, partial(_insert, of=of, rows=rows, replacing=table.upserted))

    def _differing(self, of: Relation, read: Reads, step: str) -> Iterator[tuple[Row | None, Row | None]]:
        total = read(partial(_extent, of=of))
        with self._shows(step) as advance:
            here = self._rows(read, of, lambda row, done: advance(_reached(row, done), total))
            yield from _unequal(here, self._rows(self._target.reading, of), len(of.key))

    def _rows(self, read: Reads, of: Relation, seen: Callable[[Row, int], None] = lambda *_: None) -> Iterator[Row]:
        batch = self._batch._replace(rows=KEYS_AT_ONCE) if of.columns == of.key else self._batch
        after, done = None, 0
        while page := read(partial(_page, of=of, after=after, batch=batch)):
            yield from page
            after, done = of.key_of(page[-1]), done + len(page)
            seen(page[-1], done)

    def _complete(self, source: Session, state: MoveState, compared: RecordsComparison) -> None:
        """Mark the move as complete, and record it in the audit log of the target."""
        details = {"rows": sum(compared.rows.values())}
        entry = AuditEntry(action="records.migrated", object="records", name=self._places.source, details=details)

        def note(db: Session) -> None:
            last = audit.head(db).seq
            audit.append(db, entry)
            added = db.execute("SELECT actor, address, name FROM audit WHERE seq > ?", (last,)).fetchall()
            known = "SELECT 1 FROM audit_names WHERE digest = ?"
            names = {name.hex() for row in added for name in row if not source.execute(known, (name,)).fetchone()}
            completed = msgspec.structs.replace(
                state, differing=(), completed_at=time.time(), last_record=last, names=tuple(sorted(names))
            )
            _note_state(db, completed)
            for table in TABLES:
                forget_fact(db, _progress_fact(table.name))

        self._target.writing(note)

    def note_moved(self) -> None:
        """Note in the source where the records are now."""
        self._source.writing(partial(set_fact, name=MOVED_TO, value=self._places.target))

    def compare(self) -> RecordsComparison:
        """Compare all rows, without those that a complete move has added itself; nothing is changed."""

        def both(source: Session) -> RecordsComparison:
            return self._target.reading(lambda target: self._compared_at_once(source, target))

        return self._source.reading(both)

    def _compared_at_once(self, source: Session, target: Session) -> RecordsComparison:
        _be_patient(source)
        _be_patient(target)
        state = _state(target)
        complete = state is not None and state.completed_at is not None
        relations = _at_completion(self._relations, state) if state is not None and complete else self._relations
        return self._compared(lambda work: work(source), lambda work: work(target), relations)

    def _compared(self, source: Reads, target: Reads, relations: Mapping[str, Relation]) -> RecordsComparison:
        tables = tuple(
            self._compared_table(self._relations[one.name].digests, relations[one.name].digests, source, target)
            for one in TABLES
        )
        counters = target(partial(_behind, counters=source(_counters)))
        return RecordsComparison(tables=tables, counters=counters, audit=target(_audit_problems))

    def _compared_table(self, here: Relation, there: Relation, source: Reads, target: Reads) -> TableComparison:
        with self._shows(f"Verifying {_title(here.name)}") as advance:
            total = source(partial(_extent, of=here))
            rows, digest = _sum(self._rows(source, here, lambda row, done: advance(_reached(row, done), total)))
            target_rows, target_digest = _sum(
                self._rows(target, there, lambda row, done: advance(_reached(row, done), total))
            )
            found = TableComparison(
                table=here.name, rows=rows, digest=digest, target_rows=target_rows, target_digest=target_digest
            )
            if found.is_equal:
                return found
            unequal = _unequal(self._rows(source, here), self._rows(target, there), len(here.key))
            keys = (_shown(here.key_of(one or two or ())) for one, two in islice(unequal, MAX_SHOWN))
            return msgspec.structs.replace(found, differing=tuple(keys))


def _title(table: str) -> str:
    return table.replace("_", " ")


# --- what is read


def _columns(db: Session) -> dict[str, dict[str, str]]:
    """The columns of each table with their types."""
    query = COLUMNS[db.kind]
    return {one.name: dict(map(tuple, db.execute(query, (one.name,)))) for one in TABLES}


def _relations(source: Mapping[str, Mapping[str, str]], target: Mapping[str, Mapping[str, str]]) -> dict[str, Relation]:
    relations = {}
    for name, key, *_ in TABLES:
        here, there = ({*key, *columns[name]} for columns in (source, target))
        if here != there:
            raise ConfigurationError(
                f"The table {name} has other columns in the target: {', '.join(sorted(here ^ there))}. Both must be of "
                "this version of Anabranch."
            )
        relations[name] = Relation(
            name=name,
            key=key,
            columns=(*key, *sorted(here - set(key))),
            texts=frozenset(column for column, kind in source[name].items() if kind in TEXTS),
            blobs=frozenset(column for column, kind in source[name].items() if kind in BYTES),
            table=name,
            where=COPIED_FACTS if name == "facts" else "TRUE",
        )
    return relations


def _at_completion(relations: Mapping[str, Relation], state: MoveState) -> dict[str, Relation]:
    """What the target had when the move was complete, but for the rows that the audit log has got since."""
    last, names = state.last_record, tuple(map(bytes.fromhex, state.names))
    unnamed = f"digest NOT IN ({', '.join('?' * len(names))})" if names else "TRUE"
    return {
        **relations,
        "audit": relations["audit"]._replace(where="seq <= ?", values=(last,)),
        "audit_names": relations["audit_names"]._replace(where=unnamed, values=names),
        "audit_chain": relations["audit_chain"]._replace(table=CHAIN_BEFORE, values=(last, last)),
    }


def _page(db: Session, of: Relation, after: Row | None, batch: RowBatch) -> list[Row]:
    """The rows after a key, as many as a batch may have."""
    order, columns = ", ".join(of.key), ", ".join(of.columns)
    later = "" if after is None else f" AND ({order}) > ({', '.join('?' * len(of.key))})"
    values = (*of.values, *(after or ()))
    found = f"FROM {of.table} WHERE {of.where}{later} ORDER BY {order} LIMIT {batch.rows}"
    if db.kind == "sqlite":
        read = _first(map(tuple, db.execute(f"SELECT {columns} {found}", values)), batch.size)
        return [_with_hashes(of, row) for row in read] if of.hashed else list(read)
    # The client would receive all rows before it could stop; values are only read where they are returned.
    sent = [one for one in of.columns if one in of.texts | of.blobs and one not in of.hashed]
    sizes = " + ".join(f"coalesce(octet_length({one}), 0)" for one in sent) or "0"
    page = f"SELECT {', '.join(map(of.read, of.columns))}, {sizes} AS row_size {found}"
    sized = f"SELECT *, sum(row_size) OVER (ORDER BY {order}) AS sizes FROM ({page}) AS page"  # noqa: S608  ours
    query = f"SELECT {columns} FROM ({sized}) AS sized WHERE sizes - row_size < {batch.size} ORDER BY {order}"  # noqa: S608
    return list(map(tuple, db.execute(query, values)))


def _with_hashes(of: Relation, row: Row) -> Row:
    return tuple(_hash(value) if name in of.hashed else value for name, value in zip(of.columns, row, strict=True))


def _hash(value: str | bytes | None) -> bytes | None:
    """As PostgreSQL hashes a value."""
    if value is None:
        return None
    return sha256(value if isinstance(value, bytes) else _without_nul(value).encode()).digest()


def _row(db: Session, of: Relation, key: Row) -> Row:
    query = f"SELECT {', '.join(of.columns)} FROM {of.table} WHERE {of.is_one}"  # noqa: S608  our own names
    return tuple(db.execute(query, key).fetchone())


def _extent(db: Session, of: Relation) -> int:
    """How far a table reaches: to its largest key, if that is a number, else to the number of its rows."""
    unhurried(db)
    largest = db.execute(f"SELECT max({of.key[0]}) FROM {of.name}").fetchone()[0]  # noqa: S608
    if largest is None or isinstance(largest, int):
        return largest or 0
    return int(db.execute(f"SELECT count(*) FROM {of.name}").fetchone()[0])  # noqa: S608


def _reached(row: Row, done: int) -> int:
    return row[0] if isinstance(row[0], int) else done


def _first(rows: Iterable[Row], size: int) -> Iterator[Row]:
    for row in rows:
        yield row
        size -= _size(row)
        if size <= 0:
            return


def _size(row: Row) -> int:
    return sum(len(value) for value in row if isinstance(value, str | bytes))


def _batches(rows: Iterable[Row], batch: RowBatch) -> Iterator[list[Row]]:
    left = iter(rows)
    while found := list(_first(islice(left, batch.rows), batch.size)):
        yield found


# --- what is compared


def _without_nul(value: str) -> str:
    """A text as PostgreSQL can hold it."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in value else value


def _plain(row: Row) -> Row:
    return tuple(_without_nul(value) if isinstance(value, str) else value for value in row)


def _sum(rows: Iterable[Row]) -> tuple[int, str]:
    """The number of rows, and the sum of their digests: it does not depend on their order, which NUL may change."""
    count = total = 0
    for row in rows:
        encoded = msgspec.msgpack.encode(_plain(row))
        total += int.from_bytes(blake2b(encoded, digest_size=DIGEST_BYTES).digest(), "big")
        count += 1
    return count, f"{total % (1 << 8 * DIGEST_BYTES):0{2 * DIGEST_BYTES}x}"


def _unequal(source: Iterator[Row], target: Iterator[Row], width: int) -> Iterator[tuple[Row | None, Row | None]]:
    """The rows of each key for which the two differ; None where there is none. Both are in the order of the keys."""
    here, there = next(source, None), next(target, None)
    while here is not None or there is not None:
        one = None if here is None else _plain(here[:width])
        two = None if there is None else _plain(there[:width])
        if one == two:
            if here != there and _plain(here or ()) != _plain(there or ()):
                yield here, there
            here, there = next(source, None), next(target, None)
        elif two is None or (one is not None and one < two):
            yield here, None
            here = next(source, None)
        else:
            yield None, there
            there = next(target, None)


def _shown(key: Row) -> str:
    return ", ".join(value.hex() if isinstance(value, bytes) else str(value) for value in key)


def _audit_problems(db: Session) -> tuple[str, ...]:
    return tuple(f"Record {one.seq}: {one.problem}" if one.seq else one.problem for one in audit.verify(db))


# --- what is written


def _append(db: Session, table: CopiedTable, of: Relation, page: Sequence[Row], after: Row | None) -> None:
    """Insert the rows after a key. What is skipped is inserted at the end, if it is still there then: a row that refers
    to a newer one, and one whose name the target knows from a row that is gone."""
    if _copied_to(db, table.name) != after:
        raise Conflict("Another process copies to the same place. Wait until it has finished, and run this again.")
    rows = page if table.parent is None else _with_parents(db, table.parent, of, page)
    _insert(db, of, rows)
    set_fact(db, _progress_fact(table.name), msgspec.msgpack.encode(of.key_of(page[-1])).hex())


def _with_parents(db: Session, parent: tuple[str, str], of: Relation, page: Sequence[Row]) -> list[Row]:
    column, table = parent
    at = of.columns.index(column)
    wanted = [row[at] for row in page]
    found = db.execute(f"SELECT key FROM {table} WHERE key BETWEEN ? AND ?", (min(wanted), max(wanted)))  # noqa: S608
    known = {row[0] for row in found}
    return [row for row in page if row[at] in known]


def _insert(db: Session, of: Relation, rows: Sequence[Row], *, replacing: bool = False) -> None:
    """Insert rows; leave out those that are there, also under another key, unless rows are to be replaced."""
    others = ", ".join(f"{name} = excluded.{name}" for name in of.columns if name not in of.key)
    action = f"({', '.join(of.key)}) DO UPDATE SET {others}" if replacing else "DO NOTHING"
    columns, places = ", ".join(of.columns), ", ".join("?" * len(of.columns))
    query = f"INSERT INTO {of.name} ({columns}) VALUES ({places}) ON CONFLICT {action}"  # noqa: S608  our own names
    db.executemany(query, rows)


def _delete(db: Session, of: Relation, keys: Sequence[Row]) -> None:
    db.executemany(f"DELETE FROM {of.name} WHERE {of.is_one}", keys)  # noqa: S608  our own names


def _lock(db: Session) -> None:
    """Let nothing else write to the source; in SQLite, the transaction does."""
    _be_patient(db)
    if db.kind == "postgres":
        db.execute(f"LOCK TABLE {', '.join(one.name for one in TABLES)} IN SHARE MODE")


def _be_patient(db: Session) -> None:
    """Let this transaction wait for what is done with the other database."""
    unhurried(db)
    if db.kind == "postgres":
        db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")


def _counters(db: Session) -> dict[str, int]:
    """The largest key that each table has ever had, as far as the database knows."""
    return {table: max(_largest(db, table, column), _last_used(db, table, column)) for table, column in COUNTED.items()}


def _largest(db: Session, table: str, column: str) -> int:
    return int(db.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").fetchone()[0])  # noqa: S608  our own names


def _last_used(db: Session, table: str, column: str) -> int:
    if db.kind == "sqlite":
        found = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    elif table in RESERVED:
        found = db.execute("SELECT last FROM reserved WHERE name = ?", (table,)).fetchone()
    else:
        found = db.execute(f"SELECT coalesce(pg_sequence_last_value({SEQUENCE}), 0)", (table, column)).fetchone()
    return 0 if found is None else int(found[0])


def _behind(db: Session, counters: Mapping[str, int]) -> tuple[str, ...]:
    """The tables of which a database would use keys again that another one has used."""
    own = _counters(db)
    return tuple(table for table, last in counters.items() if own[table] < last and _is_counted(db, table))


def _is_counted(db: Session, table: str) -> bool:
    """In SQLite, a question can get the key of the newest one if that was deleted."""
    return db.kind == "postgres" or table != "queries"


def _set_counters(db: Session, counters: Mapping[str, int]) -> None:
    for table, last in counters.items():
        if not last or not _is_counted(db, table):
            continue
        if db.kind == "sqlite":
            db.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
            db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (table, last))
        elif table in RESERVED:
            conflict = "ON CONFLICT (name) DO UPDATE SET last = excluded.last"
            db.execute(f"INSERT INTO reserved VALUES (?, ?) {conflict}", (table, last))  # noqa: S608
        else:
            db.execute(f"SELECT setval({SEQUENCE}, ?)", (table, COUNTED[table], last))


# --- what is noted


def _state(db: Session) -> MoveState | None:
    noted = fact(db, STATE)
    return None if noted is None else msgspec.json.decode(noted, type=MoveState)


def _note_state(db: Session, state: MoveState) -> None:
    set_fact(db, STATE, as_json(state))


def _origin(db: Session) -> Origin | None:
    noted = fact(db, ORIGIN)
    return None if noted is None else msgspec.json.decode(noted, type=Origin)


def _note_origin(db: Session, target: str) -> Origin:
    """Note that a move begins, and record it."""
    origin = Origin(id=new_id(), target=target)
    set_fact(db, ORIGIN, as_json(origin))
    audit.append(db, AuditEntry(action="records.copied", object="records", name=target))
    return origin


def _progress_fact(table: str) -> str:
    return f"{STATE}:{table}"


def _copied_to(db: Session, table: str) -> Row | None:
    """Up to which key a table was copied."""
    noted = fact(db, _progress_fact(table))
    return None if noted is None else tuple(msgspec.msgpack.decode(bytes.fromhex(noted)))
