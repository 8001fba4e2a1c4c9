"""The river itself, as the settings want it."""

from anabranch.domain.contracts import Clock, Directory, Telemetry
from anabranch.pipeline.answer import Limits, Pipeline
from anabranch.runtime.settings import Settings
from anabranch.runtime.tokens import EstimatedTokens


def river(settings: Settings, directory: Directory, clock: Clock, telemetry: Telemetry) -> Pipeline:
    return Pipeline(
        directory=directory,
        counter=EstimatedTokens(),
        clock=clock,
        telemetry=telemetry,
        limits=Limits(
            retrieval_timeout_s=settings.retrieval_timeout,
            generation_timeout_s=settings.generation_timeout,
            context_tokens=settings.max_context_tokens,
            query_context_tokens=settings.query_context_tokens,
        ),
    )
