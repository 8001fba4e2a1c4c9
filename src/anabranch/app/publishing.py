"""Published collections and models: what other nodes can query here, by owner and slug."""

from collections.abc import Collection, Sequence

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.query_log import LogEntry
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Clock, Directory, Emit, Telemetry
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
        owners = {one.owner for one in self._models}
        if self._knowledge.exists:
            knowledge = await self._knowledge()
            owners |= {endpoint.owner for endpoint, _ in await knowledge.published()}
        return owners

    async def find(self, slug: str, owner: str | None, owners: Collection[str]) -> Publication:
        """The publication with this slug: that of `owner`, else of the only one of `owners` who has one."""
        wanted = [owner] if owner else owners
        found = [one for one in await self._named(slug) if one.owner in wanted and one.owner in owners]
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
        model = publication.model
        if model is None:
            return self._pipeline
        timeout_s = self._settings.generation_timeout
        return ModelRelay(publication.path, model, self._directory, self._clock, self._telemetry, timeout_s)

    async def _named(self, slug: str) -> Sequence[Publication]:
        models = [one for one in self._models if one.slug == slug]
        if not self._knowledge.exists:
            return models
        knowledge = await self._knowledge()
        published = [
            Publication(owner=endpoint.owner, slug=slug, collection=found.id, collection_key=found.key)
            for endpoint, found in await knowledge.published(slug)
        ]
        return [*models, *published]


class ModelRelay:
    """An Answerer for a published model: it forwards the messages as they were sent, without retrieval."""

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
        emit = observed(emit, self._telemetry, context)
        try:
            written = await generate(generator, self._path, prompt, context, emit, self._clock, self._timeout_s)
        except GenerationFailed as error:
            # Only our own message: the model server's may quote the operator's key.
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
