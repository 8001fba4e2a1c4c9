"""Only `knowledge/records` runs SQL: everything else calls its functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import anabranch

PACKAGE = Path(anabranch.__file__).parent
RECORDS = PACKAGE / "knowledge" / "records"
DRIVERS = ("sqlite3", "psycopg")
SQL = re.compile(
    r"\b(SELECT\s.+\sFROM|INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM|(CREATE|DROP|ALTER)\s+TABLE|PRAGMA)\b",
    re.DOTALL,
)


def sql_use(source: str) -> Iterator[str]:
    """Imports of sqlite3 and psycopg, SQL statements in strings, and calls that execute SQL."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(name.name in DRIVERS for name in names):
                yield f"line {node.lineno}: imports a driver"
            case ast.ImportFrom(module=module) if module in DRIVERS:
                yield f"line {node.lineno}: imports a driver"
            case ast.Constant(value=str(text)) if SQL.search(text):
                yield f"line {node.lineno}: SQL {text[:40]!r}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="db"), attr=name)) if name.startswith("execute"):
                yield f"line {node.lineno}: db.{name}()"


def test_no_sql_outside_records() -> None:
    modules = [module for module in PACKAGE.rglob("*.py") if RECORDS not in module.parents]
    found = {str(module): list(sql_use(module.read_text(encoding="utf-8"))) for module in modules}
    assert {module: uses for module, uses in found.items() if uses} == {}


def test_the_check_finds_sql() -> None:
    assert any("imports a driver" in one for one in sql_use((RECORDS / "sqlite.py").read_text(encoding="utf-8")))
    for module in (RECORDS / "documents.py", RECORDS / "collections.py", RECORDS / "jobs.py"):
        assert any("db.execute()" in one for one in sql_use(module.read_text(encoding="utf-8")))
    assert len(list(sql_use('db.execute("SELECT key FROM documents")\ndb.executemany("DELETE FROM keys")'))) == 4
