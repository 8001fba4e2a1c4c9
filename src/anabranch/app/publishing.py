"""Published collections and models: what other nodes can query here, by owner and slug."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from anabranch.app.knowledge_opener import KnowledgeOpener
from anabranch.app.query_log import LogEntry
from anabranch.configuration.settings import Settings
from anabranch.domain.contracts import Answerer, Clock, Directory, Emit, Generator, Telemetry
from anabranch.domain.errors import Conflict, Forbidden, GenerationFailed, InvalidQuestion, NotFound
from anabranch.domain.model import Answer, Context, Endpoint, Ground, Prompt, Question, Timings, Value
from anabranch.domain.rights import grant_of_model
from anabranch.knowledge.model import Caller, path_taken
from anabranch.knowledge.model import Collection as KnownCollection
from anabranch.pipeline.answer import observed
from anabranch.pipeline.generate import generate

if TYPE_CHECKING:  # it loads numpy
    from anabranch.knowledge.knowledge import Knowledge

GUEST = Caller()

FAILED = "Model generation failed"
OWNER_SLUG = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,62})/([a-z0-9][a-z0-9-]{0,62})")
MAX_SHOWN = 150


class EndpointPath(NamedTuple):
    """Where a collection is published."""

    owner: str
    slug: str

    @classmethod
    def parse(cls, text: str) -> "EndpointPath":
        if not (found := OWNER_SLUG.fullmatch(text)):
            raise InvalidQuestion(
                f"{text[:MAX_SHOWN]!r} is not of the form owner/slug: the owner has letters, digits, dots, dashes and "
                f"underscores, the slug lower-case letters, digits and dashes, each up to 63 characters."
            )
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return f"{self.owner}/{self.slug}"

    @property
    def url_path(self) -> str:
        return f"/api/v1/endpoints/{self}/query"

    def source(self, origin: str) -> str:
        """How `anabranch ask --source` names it, on a server with this origin."""
        return f"{self.owner}@{origin}/{self.slug}"

    def yaml(self, origin: str) -> str:
        """The lines of an anabranch.yaml that name it. All values are quoted: YAML reads `1.0` and `no` as no text."""
        return (
            f'sources:\n  "{self.slug}":\n    url: "{origin}"\n    slug: "{self.slug}"\n    owner: "{self.owner}"\n'
            f'    # token: "${{NAME}}"  # a key of that server, if it needs one\n'
        )


async def public_documents(knowledge: "Knowledge", collection: KnownCollection) -> int:
    """How many documents of a collection callers without a key can read."""
    try:
        return (await knowledge.collection(GUEST, collection.id)).documents
    except NotFound:
        return 0


class Publication(Value):
    """A published collection (its id) or a published model, with its name in the configuration."""

    owner: str
    slug: str
    collection: str | None = None
    collection_key: int = 0
    model: Endpoint | None = None
    model_name: str = ""
    by_operator: bool = True

    def is_for(self, caller: Caller) -> bool:
        """Whether the caller's key is not restricted to other collections or models."""
        if self.model is None:
            return caller.sees(self.collection_key)
        return caller.rights.permits(grant_of_model(self.model_name))

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
            Publication(owner=owner, slug=slug, model=settings.models[name], model_name=name)
            for (owner, _, slug), name in paths
        ]

    async def owners(self, *, by_operator: bool = False) -> set[str]:
        """The owners of what is published here, or of what the operator has published."""
        return {one.owner for one in await self._published() if one.by_operator or not by_operator}

    async def find(self, caller: Caller, slug: str, owner: str | None, owners: Collection[str]) -> Publication:
        """The publication with this slug that is for the caller: that of `owner`, else of the only one of `owners` who
        has one."""
        wanted = [owner] if owner else owners
        published = [one for one in await self._published(slug) if one.is_for(caller)]
        found = [one for one in published if one.owner in wanted and one.owner in owners]
        if not found:
            raise NotFound(f"There is no endpoint {slug!r} here.")
        if len({one.path for one in found}) < len(found):
            raise Conflict(f"{found[0].path} is both a model and a collection here: one of them must be withdrawn.")
        if len(found) > 1:
            names = ", ".join(sorted(one.owner for one in found))
            raise NotFound(f"Several owners publish {slug!r} ({names}): ask /api/v1/endpoints/OWNER/{slug}/query.")
        return found[0]

    async def publish(self, caller: Caller, collection: str, path: EndpointPath) -> KnownCollection:
        """Publish a collection for a caller: the operator any, under any owner; others their own, under their name."""
        if not caller.operator and caller.user != path.owner:
            own = f"as {caller.user}/…" if caller.user is not None else "with a key"
            raise Forbidden(f"Only the operator may publish as {path}; you can publish your own collections {own}.")
        if caller.rights.collections is not None:  # that a path is taken would tell of collections that it does not see
            raise Forbidden("This API key is for some collections only, so it cannot publish them.")
        if str(path) in self._settings.published_models:
            raise path_taken(str(path))
        return await (await self._knowledge()).publish(caller, collection, *path)

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
                Publication(
                    owner=endpoint.owner,
                    slug=endpoint.slug,
                    collection=endpoint.collection_id,
                    collection_key=endpoint.collection,
                    by_operator=endpoint.by_operator,
                )
                for endpoint in await knowledge.published(slug)
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
