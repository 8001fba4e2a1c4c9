"""What this node offers to others: published collections and models, by owner and slug."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Clock, Directory, Emit, Telemetry
from anabranch.domain.errors import Conflict, GenerationFailed, NotFound
from anabranch.domain.model import Answer, Context, Endpoint, Ground, Prompt, Question, Status, Timings, Usage, Value
from anabranch.knowledge.model import Caller
from anabranch.knowledge.records import queries
from anabranch.knowledge.records.database import StoreFailed
from anabranch.knowledge.records.identifiers import new_id
from anabranch.pipeline.emitting import told
from anabranch.pipeline.generate import generate

FAILED = "Model generation failed"


class Publication(Value):
    """Either a collection (its id) or a model."""

    owner: str
    slug: str
    collection: str | None = None
    collection_key: int = 0
    model: Endpoint | None = None

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}"


class Publishing:
    def __init__(
        self,
        settings: Settings,
        rooms: KnowledgeOpener,
        directory: Directory,
        pipeline: Answerer,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._rooms = rooms
        self._directory = directory
        self._pipeline = pipeline
        self._clock = clock
        self._telemetry = telemetry
        paths = ((path.partition("/"), name) for path, name in settings.published_models.items())
        self._models = [
            Publication(owner=owner, slug=slug, model=settings.models[name]) for (owner, _, slug), name in paths
        ]

    async def owners(self) -> set[str]:
        """Whoever publishes something here."""
        owners = {one.owner for one in self._models}
        if self._rooms.exists:
            room = await self._rooms()
            owners |= {endpoint.owner for endpoint, _ in await room.published()}
        return owners

    async def find(self, slug: str, owner: str | None, owners: Collection[str]) -> Publication:
        """What is published under a slug by one owner, or by the only one of those who may be asked."""
        asked = [owner] if owner else owners
        found = [one for one in await self._named(slug) if one.owner in asked and one.owner in owners]
        if not found:
            raise NotFound(f"There is no endpoint {slug!r} here.")
        if len({one.path for one in found}) < len(found):
            raise Conflict(f"{found[0].path} is both a model and a collection here: one of them must be withdrawn.")
        if len(found) > 1:
            names = ", ".join(sorted(one.owner for one in found))
            raise NotFound(f"Several owners publish {slug!r} ({names}): ask /api/v1/endpoints/OWNER/{slug}/query.")
        return found[0]

    def answerer(self, publication: Publication, transaction: str | None) -> Answerer:
        """Who answers for it. What was asked, and the token by which it is paid for, is on record before the answer is
        given."""
        model = publication.model
        if model is None:
            inner = self._pipeline
        else:
            timeout_s = self._settings.generation_timeout
            inner = ModelRelay(publication.path, model, self._directory, self._clock, self._telemetry, timeout_s)
        return RecordedAnswerer(inner, publication, transaction, self._rooms, keep=self._settings.query_log_days > 0)

    async def _named(self, slug: str) -> Sequence[Publication]:
        models = [one for one in self._models if one.slug == slug]
        if not self._rooms.exists:
            return models
        room = await self._rooms()
        published = [
            Publication(owner=endpoint.owner, slug=slug, collection=found.id, collection_key=found.key)
            for endpoint, found in await room.published(slug)
        ]
        return [*models, *published]


class ModelRelay:
    """A published model alone: it gets the messages as they were sent, and nothing is looked up for it."""

    def __init__(
        self,
        path: str,
        model: Endpoint,
        directory: Directory,
        clock: Clock,
        telemetry: Telemetry,
        timeout_s: float,
    ) -> None:
        self._path = path
        self._model = model
        self._directory = directory
        self._clock = clock
        self._telemetry = telemetry
        self._timeout_s = timeout_s

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        prompt = Prompt(
            question=question.text,
            messages=question.history,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            passages=(),
            version="as sent",
        )
        generator = self._directory.generator(self._model)
        emit = told(emit, self._telemetry, context)
        try:
            written = await generate(generator, self._path, prompt, context, emit, self._clock, self._timeout_s)
        except GenerationFailed as error:
            # Our own words only: those of the model's server may quote the key with which the operator asks it.
            said = error.message.removeprefix(f"{FAILED}: ").partition(": ")[0].removesuffix(".")
            raise type(error)(f"{FAILED}: {said}.", model_path=self._path) from error
        return Answer(
            text=written.text,
            ground=Ground.NO_SOURCES,
            timings=Timings(generation_ms=written.time_ms, total_ms=written.time_ms),
            usage=written.usage,
            finish_reason=written.finish_reason,
            model=self._path,
        )


class RecordedAnswerer:
    """An Answerer whose answers stand in the query log before anybody has them. Without `keep` the log is switched off:
    then only what was paid for is noted, and not what was asked."""

    def __init__(
        self, inner: Answerer, publication: Publication, transaction: str | None, rooms: KnowledgeOpener, *, keep: bool
    ) -> None:
        self._inner = inner
        self._publication = publication
        self._transaction = transaction
        self._rooms = rooms
        self._keep = keep

    async def answer(self, question: Question, context: Context, emit: Emit) -> Answer:
        answer = await self._inner.answer(question, context, emit)
        if all(reply.status is Status.SUCCESS for reply in answer.replies):
            if self._transaction is not None:
                await (await self._rooms()).record(self._asked(question, answer, context))
            elif self._keep and self._rooms.exists:
                with suppress(StoreFailed):  # a log that cannot be written costs nobody the answer
                    await (await self._rooms()).record(self._asked(question, answer, context))
        return answer

    def _asked(self, question: Question, answer: Answer, context: Context) -> queries.QueryRecord:
        one, usage = self._publication, answer.usage or Usage()
        return queries.QueryRecord(
            id=new_id(),
            user=queries.asker(Caller.of(context)),
            original=question.text if self._keep else "",
            answer=answer.text if self._keep else "",
            refused=False,
            model=answer.model,
            found=tuple(passage for reply in answer.replies for passage in reply.passages) if self._keep else (),
            quotes=(),
            collections=(one.collection_key,) if one.collection is not None else (),
            top_k=question.top_k,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            retrieval_ms=answer.timings.retrieval_ms,
            latency_ms=answer.timings.total_ms,
            endpoint=one.path,
            transaction_token=self._transaction,
        )
