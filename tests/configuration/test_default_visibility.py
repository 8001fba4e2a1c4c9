"""Who sees a collection for which nobody says it: in a new data folder its owner, in an older one everybody."""

import json
import zipfile
from io import StringIO
from pathlib import Path

import pytest

from anabranch.app.startup import check
from anabranch.knowledge.model import Caller, DefaultVisibility
from anabranch.knowledge.records.sqlite import connect
from anabranch.telemetry.log import configured_log
from support.environment import loaded
from support.knowledge_fixtures import ALICE, BOB, workshop

pytestmark = pytest.mark.usefixtures("isolated_home")

ARCHIVE = Path(__file__).parents[1] / "knowledge" / "data" / "data_folder_0.1.0.zip"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A data folder that version 0.1.0 wrote."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path / "data")
    return tmp_path / "data"


async def sees_new_collection(folder: Path, setting: DefaultVisibility | None) -> bool:
    """Whether Bob sees a document in a new collection of Alice for which she names no permissions."""
    async with workshop(folder, default_visibility=setting) as opened:
        await opened.collection("new", ALICE)
        await opened.put("Wombats dig.", collection="new", caller=ALICE)
        assert "Wombats" in await opened.titles("wombats", ALICE)
        return "Wombats" in await opened.titles("wombats", BOB)


async def test_a_new_data_folder_keeps_new_collections_to_their_owner(tmp_path: Path) -> None:
    assert not await sees_new_collection(tmp_path, None)


async def test_an_older_data_folder_keeps_new_collections_public(released: Path) -> None:
    assert await sees_new_collection(released, None)


@pytest.mark.parametrize("setting", ["private", "public"])
async def test_default_visibility_is_that_of_a_new_collection(tmp_path: Path, setting: DefaultVisibility) -> None:
    assert loaded(DEFAULT_VISIBILITY=setting).default_visibility == setting
    assert await sees_new_collection(tmp_path, setting) == (setting == "public")


@pytest.mark.parametrize("setting", ["private", "public"])
async def test_the_setting_decides_in_an_older_data_folder_too(released: Path, setting: DefaultVisibility) -> None:
    assert await sees_new_collection(released, setting) == (setting == "public")


async def test_documents_of_an_older_data_folder_are_seen_by_the_same_callers(released: Path) -> None:
    async with workshop(released, default_visibility=None) as opened:
        assert sorted(await opened.titles("spare key", BOB)) == ["Boilers", "Lift"]
        assert "Spare key" in await opened.titles("spare key", ALICE)
    with connect(released / "records.sqlite") as db:
        kept = dict(db.execute("SELECT title, visibility FROM documents").fetchall())
    assert kept == {"Boilers": "collection", "Lift": "collection", "Spare key": kept["Spare key"]}
    assert kept["Spare key"] != "collection"


def said_at_the_start(folder: Path, **given: str) -> list[str]:
    written = StringIO()
    embedding = {"EMBEDDING_URL": "http://127.0.0.1:1", "EMBEDDING_MODEL": "fake-128"}
    settings = loaded(DATA_DIR=str(folder), LOG_FORMAT="json", **embedding, **given)
    check(settings, configured_log(settings, written))
    return [json.loads(line)["event"] for line in written.getvalue().splitlines()]


def test_the_start_says_once_that_an_older_folder_makes_public_collections(released: Path, tmp_path: Path) -> None:
    assert said_at_the_start(released).count("new_collections_are_public") == 1
    assert "new_collections_are_public" not in said_at_the_start(released, DEFAULT_VISIBILITY="public")
    assert "new_collections_are_public" not in said_at_the_start(tmp_path / "none")


async def test_the_start_says_nothing_of_a_new_folder(tmp_path: Path) -> None:
    async with workshop(tmp_path, default_visibility=None) as opened:
        await opened.collection("new", Caller(operator=True))
    assert said_at_the_start(tmp_path) == []
