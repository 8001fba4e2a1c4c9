"""The claims in training/written."""

from pathlib import Path

import pytest

from training.written_files import Sources, each_form, read

WRITTEN = Path(__file__).parents[2] / "training" / "written"
KINDS = {"number", "date", "name", "negation"}


@pytest.mark.parametrize("name", ["train", "fit", "development", "test"])
def test_every_written_claim_has_its_passage_and_wrong_forms(name: str) -> None:
    references, claims = read(WRITTEN / f"{name}.jsonl.xz")
    known = {reference["id"]: reference for reference in references}
    for claim in claims:
        reference = known[claim["id"]]
        if "spans" in reference:
            assert max(claim["of"]) < len(reference["spans"])
        forms = list(each_form(claim))
        assert forms
        assert all(form["change"] in KINDS and form["wrong"] != claim["claim"] for form in forms)


def test_no_passage_of_the_test_claims_is_in_another_file() -> None:
    tested = {reference["id"] for reference in read(WRITTEN / "test.jsonl.xz")[0]}
    for name in ("train", "fit", "development"):
        assert tested.isdisjoint(reference["id"] for reference in read(WRITTEN / f"{name}.jsonl.xz")[0])


def test_a_passage_is_cut_from_its_source(tmp_path: Path) -> None:
    (tmp_path / "package-1.0").mkdir()
    (tmp_path / "package-1.0" / "guide.md").write_text("# Guide\n\nIt waits\n5 seconds. Then it stops.\n")
    reference = {
        "id": "package-1.0/guide.md#Guide",
        "title": "Guide",
        "set": "documentation",
        "file": "package-1.0/guide.md",
        "spans": [[9, 28], [29, 43]],
    }
    passage = Sources(tmp_path).passage(reference)
    assert passage["sentences"] == ["It waits 5 seconds.", "Then it stops."]
    assert (passage["title"], passage["set"]) == ("Guide", "documentation")
