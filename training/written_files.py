"""Unpacks the claims of training/written, with the texts that they are about, for `training.written_claims` and
`benchmarks.claims`.

    python -m training.written_files --written FILE... --sources DIR --out NAME [--each]

writes NAME.passages.jsonl and NAME.claims.jsonl. The repository has the claims, but not the texts: training/written
says what DIR must have. `--each` writes a claim with several wrong forms once for each of them.
"""

import argparse
import json
import lzma
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Sources:
    """The texts that passages refer to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._collections: dict[str, dict[str, Row]] = {}

    def passage(self, reference: Row) -> Row:
        name = reference["id"]
        collection, _, key = name.partition(":")
        if "file" in reference:
            text = (self._folder / reference["file"]).read_text("utf-8", "replace")
            title, sentences = reference["title"], _cut(text, reference["spans"])
        elif "spans" in reference:
            row = self._collection(collection)[key]
            title, sentences = row["title"], _cut(row["text"], reference["spans"])
        elif collection == "hotpot":
            title, sentences = key, self._hotpot[key]
        else:
            row = self._public[int(name.removeprefix("p"))]
            title, sentences = row["t"], row["s"]
        shown = [sentence.strip() for sentence in sentences if sentence.strip()]
        return {"id": name, "title": title, "sentences": shown, "set": reference.get("set", "public")}

    def _collection(self, name: str) -> dict[str, Row]:
        if name not in self._collections:
            lines = (self._folder / name / "corpus.jsonl").read_text("utf-8").splitlines()
            self._collections[name] = {row["_id"]: row for row in map(json.loads, lines)}
        return self._collections[name]

    @cached_property
    def _hotpot(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads((self._folder / "hotpotqa-100" / "corpus.json").read_text("utf-8"))
        return found

    @cached_property
    def _public(self) -> list[Row]:
        found: list[Row] = json.loads(lzma.decompress((self._folder / "data.json.xz").read_bytes()))["P"]
        return found


def _cut(text: str, spans: list[list[int]]) -> list[str]:
    return [" ".join(text[start:end].split()) for start, end in spans]


def read(file: Path) -> tuple[list[Row], list[Row]]:
    """The references to passages and the claims of a file."""
    first, *rows = map(json.loads, lzma.decompress(file.read_bytes()).decode().splitlines())
    return rows[: first["passages"]], rows[first["passages"] :]


def each_form(claim: Row) -> Iterator[Row]:
    """The claim once for each of its wrong forms."""
    if isinstance(claim["wrong"], str):
        yield claim
        return
    for change, wrong in claim["wrong"]:
        yield {**claim, "wrong": wrong, "change": change}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--written", type=Path, nargs="+", required=True)
    options.add_argument("--sources", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--each", action="store_true")
    told = options.parse_args()
    sources = Sources(told.sources)
    files = [read(file) for file in told.written]
    passages = [sources.passage(reference) for references, _ in files for reference in references]
    claims = [claim for _, claims in files for claim in claims]
    if told.each:
        claims = [form for claim in claims for form in each_form(claim)]
    for kind, rows in (("passages", passages), ("claims", claims)):
        lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        told.out.with_name(f"{told.out.name}.{kind}.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(passages)} passages, {len(claims)} claims")


if __name__ == "__main__":
    main()
