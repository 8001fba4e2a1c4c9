"""Reads the dataset of an evaluation of answers: documents, questions, reference answers and gold sentences."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from anabranch.app.answer_evaluation import EvaluatedQuestion, GoldSentence
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Value
from anabranch.entrypoints.cli.evaluation_documents import text_document
from anabranch.entrypoints.cli.ingest import find_files, open_file
from anabranch.knowledge.model import NewDocument

T = TypeVar("T")
QUESTIONS, FOLDER, CORPUS = "questions.jsonl", "documents", "corpus.jsonl"
HOTPOT_QUESTIONS, HOTPOT_CORPUS = "questions.json", "corpus.json"
LAYOUT = (
    f"An evaluation of answers needs {QUESTIONS}, and the documents in {FOLDER}/ or {CORPUS}; or HotpotQA's "
    f"{HOTPOT_QUESTIONS}. docs/evaluate-answers.md describes them."
)


class AnswerDataset(Value):
    """The documents' identities are the names by which gold sentences refer to them. `digest` is that of the whole
    dataset: it changes with every question and document. `unknown_facts` supporting facts of HotpotQA name no
    sentence, and are left out."""

    name: str
    documents: tuple[NewDocument, ...]
    questions: tuple[EvaluatedQuestion, ...]
    digest: str
    unknown_facts: int = 0


class CorpusLine(Value):
    """A document in BEIR's layout."""

    id: str = msgspec.field(name="_id")
    text: str
    title: str | None = None


class HotpotQuestion(Value):
    """A question as HotpotQA has it: `context` has titles and sentences, `supporting_facts` titles and the numbers of
    sentences."""

    question: str
    answer: str
    context: tuple[tuple[str, tuple[str, ...]], ...] = ()
    supporting_facts: tuple[tuple[str, int], ...] = ()


def read_dataset(folder: Path, limit: int | None) -> AnswerDataset:
    """The dataset with the first `limit` questions. ConfigurationError if something is missing or wrong."""
    name = folder.resolve().name
    unknown_facts = 0
    if (folder / QUESTIONS).is_file():
        questions = tuple(one for _, one in _numbered(folder / QUESTIONS, EvaluatedQuestion))
        documents = _documents(folder)
    elif (folder / HOTPOT_QUESTIONS).is_file():
        questions, documents, unknown_facts = _hotpot(folder)
    else:
        raise ConfigurationError(f"There is no {QUESTIONS} in {folder}. {LAYOUT}")
    if not questions:
        raise ConfigurationError(f"There is no question in {folder / QUESTIONS}. {LAYOUT}")
    known = {one.identity for one in documents}
    for number, question in enumerate(questions, 1):
        if not question.question.strip():
            raise ConfigurationError(f"Question {number} of {name} is empty.")
        missing = [one.document for one in question.evidence if one.document not in known]
        if missing:
            raise ConfigurationError(
                f"Question {number} of {name} has evidence in {missing[0]!r}, which is not one of its documents."
            )
    return AnswerDataset(
        name=name,
        documents=documents,
        questions=questions[:limit],
        digest=_digest(questions, documents),
        unknown_facts=unknown_facts,
    )


def _digest(questions: Sequence[EvaluatedQuestion], documents: Sequence[NewDocument]) -> str:
    found = hashlib.sha256(msgspec.json.encode(questions))
    for one in documents:
        found.update(f"{one.identity}\0{len(one.data)}\0".encode(errors="surrogatepass") + one.data)
    return found.hexdigest()


def _documents(folder: Path) -> tuple[NewDocument, ...]:
    if (folder / FOLDER).is_dir():
        return tuple(_files(folder / FOLDER))
    if (folder / CORPUS).is_file():
        return tuple(_corpus(folder / CORPUS))
    raise ConfigurationError(f"There are no documents in {folder}. {LAYOUT}")


def _corpus(path: Path) -> Iterator[NewDocument]:
    lines: dict[str, int] = {}
    for number, one in _numbered(path, CorpusLine):
        # Gold sentences name a document by its id.
        if one.id in lines:
            raise ConfigurationError(
                f"{path}, line {number}: the _id {one.id!r} is already used in line {lines[one.id]}."
            )
        lines[one.id] = number
        yield text_document(one.id, one.title or "", one.text)


def _files(folder: Path) -> Iterator[NewDocument]:
    for found in find_files([str(folder)]).found:
        try:
            with open_file(found) as file:
                data = file.read()
        except OSError as error:
            raise ConfigurationError(f"{folder / found.name} cannot be read ({error.strerror}).") from None
        yield NewDocument(source="file", data=data, filename=found.name, identity=found.name)


def _hotpot(folder: Path) -> tuple[tuple[EvaluatedQuestion, ...], tuple[NewDocument, ...], int]:
    """HotpotQA's questions. The documents are those of the questions, and of corpus.json if there is one. Last is the
    number of supporting facts that name no sentence: the published files have some."""
    rows = _decoded(folder / HOTPOT_QUESTIONS, tuple[HotpotQuestion, ...])
    texts: dict[str, Sequence[str]] = {}
    if (folder / HOTPOT_CORPUS).is_file():
        texts.update(_decoded(folder / HOTPOT_CORPUS, dict[str, tuple[str, ...]]))
    for row in rows:
        for title, sentences in row.context:
            texts.setdefault(title, sentences)
    questions = tuple(
        EvaluatedQuestion(question=row.question, answers=(row.answer,), evidence=tuple(_facts(row, texts)))
        for row in rows
    )
    unknown = sum(len(row.supporting_facts) for row in rows) - sum(len(one.evidence) for one in questions)
    documents = tuple(text_document(title, title, "".join(sentences)) for title, sentences in texts.items())
    return questions, documents, unknown


def _facts(row: HotpotQuestion, texts: Mapping[str, Sequence[str]]) -> Iterator[GoldSentence]:
    """The sentences of the question's context, or of another document, that its supporting facts name."""
    context = dict(row.context)
    for title, number in row.supporting_facts:
        sentences = context.get(title, texts.get(title, ()))
        if 0 <= number < len(sentences):
            yield GoldSentence(document=title, text=sentences[number].strip())


def _numbered(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """The values of a JSON Lines file with the numbers of their lines."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            yield number, _convert(line, kind, f"{path}, line {number}")


def _decoded(path: Path, kind: Any) -> Any:
    return _convert(_read(path), kind, str(path))


def _convert(content: bytes, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}: {error}. {LAYOUT}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror}).") from None
