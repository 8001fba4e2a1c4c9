"""What in the schema of the records could add, hide or replace something of the audit log."""

from collections.abc import Iterator, Mapping
from contextlib import closing

from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.schema import MIGRATIONS
from anabranch.knowledge.records.sqlite import connect_to, migrate

# The kind and the name of something in the schema.
Part = tuple[str, str]

# The tables of the log with their indexes and triggers, and whatever else names one of them.
SQLITE = (
    "SELECT type, name, sql FROM sqlite_schema "
    "WHERE tbl_name COLLATE NOCASE IN ('audit', 'audit_names', 'audit_chain') OR sql LIKE '%audit%'"
)
# In PostgreSQL, also policies hide rows, rules replace statements, children add rows, and constraints refuse them.
POSTGRES = """
WITH place AS (SELECT relnamespace AS space FROM pg_class WHERE oid = to_regclass('facts')),
log AS (
    SELECT pg_class.* FROM pg_class, place
    WHERE relnamespace = space AND relname IN ('audit', 'audit_names', 'audit_chain')
)
SELECT 'table', relname::text, concat(relkind, CASE WHEN relrowsecurity THEN ' with row security' END) FROM log
UNION ALL
SELECT 'column', concat(relname, '.', attname), concat_ws(
    ' ', format_type(atttypid, atttypmod), CASE WHEN attcollation != 0 THEN attcollation::regcollation END,
    CASE WHEN attnotnull THEN 'not null' END, pg_get_expr(adbin, adrelid), nullif(attidentity::text, '')
) FROM log JOIN pg_attribute ON attrelid = log.oid AND attnum > 0 AND NOT attisdropped
LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
UNION ALL
SELECT 'index', indexrelid::regclass::text, concat(
    pg_get_indexdef(indexrelid, 0, TRUE), CASE WHEN NOT indisvalid THEN ' invalid' END
) FROM log JOIN pg_index ON indrelid = log.oid
UNION ALL
SELECT 'trigger', concat(tgname, ' on ', relname), concat(tgenabled, ' ', pg_get_triggerdef(pg_trigger.oid, TRUE))
FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid JOIN pg_proc ON pg_proc.oid = tgfoid, place
WHERE relnamespace = space AND (tgrelid IN (SELECT oid FROM log) OR prosrc ILIKE '%audit%')
UNION ALL
SELECT 'function', pg_proc.oid::regprocedure::text, prosrc
FROM pg_proc, place WHERE pronamespace = space AND prosrc ILIKE '%audit%'
UNION ALL
SELECT CASE WHEN relkind IN ('v', 'm') THEN 'view' ELSE 'rule' END, concat(relname, '.', rulename), ''
FROM pg_rewrite JOIN pg_class ON pg_class.oid = ev_class, place
WHERE relnamespace = space AND (ev_class IN (SELECT oid FROM log) OR pg_get_ruledef(pg_rewrite.oid) ILIKE '%audit%')
UNION ALL
SELECT 'policy', concat(polname, ' on ', relname), '' FROM log JOIN pg_policy ON polrelid = log.oid
UNION ALL
SELECT 'inheritance', concat(inhrelid::regclass, ' of ', inhparent::regclass), ''
FROM log JOIN pg_inherits ON log.oid IN (inhrelid, inhparent)
UNION ALL
SELECT 'constraint', conname::text, '' FROM log JOIN pg_constraint ON log.oid IN (conrelid, confrelid)
WHERE contype NOT IN ('n', 'p')
"""
NUMBER, TEXT, BYTES = "bigint not null", 'text "C" not null', "bytea not null"
COLUMNS = {
    "audit": {
        **dict.fromkeys(("seq", "at_us"), NUMBER),
        **dict.fromkeys(("action", "outcome", "surface", "api_key", "request", "object", "details"), TEXT),
        **dict.fromkeys(("actor", "address", "name", "hash"), BYTES),
    },
    "audit_names": {"digest": BYTES, "salt": BYTES, "day": "integer not null", "subject": TEXT, "name": TEXT},
    "audit_chain": {"anchor_seq": NUMBER, "anchor_hash": BYTES, "head_seq": NUMBER, "head_hash": BYTES},
}
OTHERS: Mapping[Part, str] = {
    ("index", "audit_pkey"): "CREATE UNIQUE INDEX audit_pkey ON audit USING btree (seq)",
    ("index", "audit_names_pkey"): "CREATE UNIQUE INDEX audit_names_pkey ON audit_names USING btree (digest)",
    ("index", "audit_names_by_subject"): "CREATE INDEX audit_names_by_subject ON audit_names USING hash (subject)",
    ("trigger", "audit_is_not_changed on audit"): "O CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit "
    "FOR EACH ROW EXECUTE FUNCTION audit_is_not_changed()",
    ("function", "audit_is_not_changed()"): (
        "\nBEGIN\n    RAISE EXCEPTION 'records of the audit log are not changed';\nEND "
    ),
}


def differences(db: Session) -> Iterator[str]:
    """How the log's part of the schema differs from the one that Anabranch makes."""
    expected, found = _expected(db), _found(db)
    for kind, name in sorted(expected.keys() | found.keys()):
        if (kind, name) not in found:
            yield f"The {kind} {name} is missing."
        elif (kind, name) not in expected:
            yield f"The {kind} {name} is not one of Anabranch."
        elif found[kind, name] != expected[kind, name]:
            yield f"The {kind} {name} was changed."


def is_readable(db: Session) -> bool:
    """Whether the log has all its columns. Without one, PostgreSQL reads nothing more in the transaction."""
    return db.kind == "sqlite" or {part for part in _expected(db) if part[0] == "column"} <= _found(db).keys()


def _expected(db: Session) -> Mapping[Part, str]:
    if db.kind == "postgres":
        tables = {("table", table): "r" for table in COLUMNS}
        columns = {
            ("column", f"{table}.{name}"): kind for table, names in COLUMNS.items() for name, kind in names.items()
        }
        return {**tables, **columns, **OTHERS}
    version = db.execute("PRAGMA user_version").fetchone()[0]
    with closing(connect_to(":memory:")) as made:
        migrate(made, MIGRATIONS[:version])
        return _found(made)


def _found(db: Session) -> Mapping[Part, str]:
    found = db.execute(POSTGRES if db.kind == "postgres" else SQLITE)
    return {(str(kind), str(name)): definition for kind, name, definition in found}
