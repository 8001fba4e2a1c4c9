"""What the cosines of embedders mean."""

import msgspec

from anabranch.configuration.settings import Settings
from anabranch.domain.model import Calibration, RelevanceCurve

# Measured for all-MiniLM-L6-v2: docs/chunking.md and docs/search.md have the figures.
MINILM = Calibration(topic_threshold=0.35, relevance=RelevanceCurve(near=5.4, shared=2.0, bias=-1.9))


def calibration_for(settings: Settings) -> Calibration:
    """MiniLM's, also for other embedders, where the settings have no other values."""
    found = MINILM
    if settings.embedding_topic_threshold is not None:
        found = msgspec.structs.replace(found, topic_threshold=settings.embedding_topic_threshold)
    if settings.embedding_relevance is not None:
        near, shared, bias = settings.embedding_relevance
        found = msgspec.structs.replace(found, relevance=RelevanceCurve(near=near, shared=shared, bias=bias))
    return found
