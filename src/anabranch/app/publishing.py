"""Published collections and models: what other nodes can query here, by owner and slug."""

from collections.abc import Collection

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.query_log import LogEntry
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Clock, Directory, Emit, Generator, Telemetry
from anabranch.domain.errors import Conflict, GenerationFailed, NotFound
from anabranch.domain.model import Answer, Context, Endpoint, Ground, Prompt, Question, Timings, Value
from anabranch.pipeline.answer import generate, observed

FAILED = "Model generation failed"


class Publication(Value):
    """A published collection (its id) or a published model."""

    owner: str
    slug: str
    collection: str | None = None
    collection_key: int = 0
    model: Endpoint | None = None

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.slug}"

    def log_entry(self, transaction: str | None) -> LogEntry:
        """The record of a question to it, with the token that pays for the answer."""
        collections = () if self.collection is None else (self.collection_key,)
        return LogEntry(collections=collections, endpoint=self.path, transaction=transaction)


class Publishing:
    def __init__(
        self,
        settings: Settings,
        knowledge: KnowledgeOpener,
        directory: Directory,
        pipeline: Answerer,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._knowledge = knowledge
        self._directory = directory
        self._pipeline = pipeline
        self._clock = clock
        self._telemetry = telemetry
        paths = ((path.partition("/"), name) for path, name in settings.published_models.items())
        self._models = [
            Publication(owner=owner, slug=slug, model=settings.models[name]) for (owner, _, slug), name in paths
        ]

    async def owners(self) -> set[str]:
        """The owners that publish something here."""
        return {one.owner for one in await self._published()}

    async def find(self, slug: str, owner: str | None, owners: Collection[str]) -> Publication:
        """The publication with this slug: that of `owner`, else of the only one of `owners` who has one."""
        wanted = [owner] if owner else owners
        found = [one for one in await self._published(slug) if one.owner in wanted and one.owner in owners]
        if not found:
            raise NotFound(f"There is no endpoint {slug!r} here.")
        if len({one.path for one in found}) < len(found):
            raise Conflict(f"{found[0].path} is both a model and a collection here: one of them must be withdrawn.")
        if len(found) > 1:
            names = ", ".join(sorted(one.owner for one in found))
            raise NotFound(f"Several owners publish {slug!r} ({names}): ask /api/v1/endpoints/OWNER/{slug}/query.")
        return found[0]

    def answerer(self, publication: Publication) -> Answerer:
        """The Answerer of a published collection or model; its answers are never cached."""
        if publication.model is None:
            return self._pipeline
        generator = self._directory.generator(publication.model)
        return ModelRelay(publication.path, generator, self._clock, self._telemetry, self._settings.generation_timeout)

    async def _published(self, slug: str | None = None) -> list[Publication]:
        """All publications, or those with a slug."""
        found = [one for one in self._models if slug in (None, one.slug)]
        if self._knowledge.exists:
            knowledge = await self._knowledge()
            found += [
                Publication(owner=endpoint.owner, slug=endpoint.slug, collection=one.id, collection_key=one.key)
                for endpoint, one in await knowledge.published(slug)
            ]
        return found


class ModelRelay:
    """An Answerer for a published model: it forwards the messages as they were sent, without retrieval."""

    def __init__(self, path: str, generator: Generator, clock: Clock, telemetry: Telemetry, timeout_s: float) -> None:
        self._path = path
        self._generator = generator
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
        emit = observed(emit, self._telemetry, context)
        try:
            written = await generate(self._generator, self._path, prompt, context, emit, self._clock, self._timeout_s)
        except GenerationFailed as error:
            # Only our own message: the model server's may quote the operator's key.
            reason = error.message.removeprefix(f"{FAILED}: ").partition(": ")[0].removesuffix(".")
            raise type(error)(f"{FAILED}: {reason}.", model_path=self._path) from error
        return Answer(
            text=written.text,
            ground=Ground.NO_SOURCES,
            timings=Timings(generation_ms=written.time_ms, total_ms=written.time_ms),
            usage=written.usage,
            finish_reason=written.finish_reason,
            model=self._path,
        )
