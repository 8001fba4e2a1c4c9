"""Sends one question to many sources in parallel and returns one answer with citations."""

from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names

if TYPE_CHECKING:
    from anabranch.app.anabranch import Anabranch
    from anabranch.configuration.settings import Settings
    from anabranch.domain.errors import AnabranchError
    from anabranch.domain.events import (
        Answered,
        AnswerEvent,
        Failed,
        FellBack,
        GenerationStarted,
        PromptComposed,
        RetrievalFinished,
        RetrievalStarted,
        SentenceChecked,
        SourceReplied,
        Token,
    )
    from anabranch.domain.explanation import ExplainedPassage, Explanation, PassageStep
    from anabranch.domain.mcp import (
        AggregatedResponse,
        AggregatorError,
        AggregatorQuery,
        AllServersFailed,
        ConfigError,
        InvalidQuery,
        TimedOut,
    )
    from anabranch.domain.model import (
        Answer,
        CheckedSentence,
        Citation,
        Endpoint,
        Fallback,
        Message,
        Passage,
        Question,
        SourceConflict,
        SourceReply,
        Status,
        SupportingQuote,
        Until,
    )

__all__ = [
    "AggregatedResponse",
    "AggregatorError",
    "AggregatorQuery",
    "AllServersFailed",
    "Anabranch",
    "AnabranchError",
    "Answer",
    "AnswerEvent",
    "Answered",
    "CheckedSentence",
    "Citation",
    "ConfigError",
    "Endpoint",
    "ExplainedPassage",
    "Explanation",
    "Failed",
    "Fallback",
    "FellBack",
    "GenerationStarted",
    "InvalidQuery",
    "Message",
    "Passage",
    "PassageStep",
    "PromptComposed",
    "Question",
    "RetrievalFinished",
    "RetrievalStarted",
    "SentenceChecked",
    "Settings",
    "SourceConflict",
    "SourceReplied",
    "SourceReply",
    "Status",
    "SupportingQuote",
    "TimedOut",
    "Token",
    "Until",
]
__getattr__ = lazy_names(
    __name__,
    (
        "domain.model",
        "domain.events",
        "domain.errors",
        "domain.explanation",
        "domain.mcp",
        "configuration.settings",
        "app.anabranch",
    ),
)
