"""The audit log says which settings a server started with that are others than at the start before."""

from pathlib import Path
from typing import Any

from anabranch.configuration.settings import Settings, compared
from anabranch.domain.audit import AuditFilter
from anabranch.domain.model import Endpoint
from anabranch.knowledge.records import audit, used_settings
from conftest import running
from support.knowledge_fixtures import records_in, workshop

SECRET = "correct horse battery staple"


async def started(folder: Path, **given: Any) -> list[tuple[str, ...]]:
    """What the records of all starts so far say, after one more with these settings."""
    async with running(Settings(data_dir=str(folder), log_level="ERROR", **given)):
        pass
    database = records_in(folder)
    try:
        assert database.reading(audit.verify) == []
        found = database.reading(lambda db: audit.listed(db, AuditFilter(action=used_settings.ACTION), None, 50))
    finally:
        database.close()
    assert all((one.actor, one.surface) == ("operator", "start") for one in found)
    return [tuple(one.details["settings"]) for one in reversed(found)]


async def test_a_start_with_other_settings_leaves_a_record_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with workshop(folder) as shop:
        await shop.collection()
    assert await started(folder) == []
    assert await started(folder) == []
    other = {"auth": "api_key", "sources": {"docs": Endpoint(slug="docs", url="http://127.0.0.1:1", operator=True)}}
    changed: list[tuple[str, ...]] = [("AGGREGATOR_AUTH", "sources")]
    assert await started(folder, **other) == changed
    assert await started(folder, **other) == changed
    changed.append(("AGGREGATOR_BACKUP_PASSPHRASE",))
    assert await started(folder, **other, backup_passphrase=SECRET) == changed
    changed.append(("AGGREGATOR_AUTH", "AGGREGATOR_BACKUP_PASSPHRASE", "sources"))
    assert await started(folder) == changed
    assert SECRET.encode() not in b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


async def test_settings_that_a_version_adds_or_removes_are_not_changed_by_anybody(tmp_path: Path) -> None:
    database = records_in(tmp_path)
    for values in ({"one": "1", "gone": "1"}, {"one": "1", "new": "1"}, {"one": "2", "new": "1"}):
        await database.write(lambda db, values=values: used_settings.note(db, values))  # type: ignore[misc]
    found = database.reading(lambda db: audit.listed(db, AuditFilter(), None, 50))
    assert [record.details for record in found] == [{"settings": ["one"]}]
    database.close()


async def test_a_server_without_records_starts_and_creates_none(tmp_path: Path) -> None:
    async with running(Settings(data_dir=str(tmp_path / "data"), log_level="ERROR")):
        pass
    assert not (tmp_path / "data").exists()


def test_secrets_are_compared_only_by_whether_they_are_set() -> None:
    before, after = (compared(Settings(backup_passphrase=one)) for one in (SECRET, SECRET[::-1]))
    assert before == after != compared(Settings())
    assert SECRET not in repr(before)
