"""Public fakes: a real Space and Hub to talk to, and stand-ins for the domain's contracts."""

from anabranch.testing.embedder import FakeEmbedder
from anabranch.testing.failures import Failure
from anabranch.testing.fakes import FakeDirectory, FakeGenerator, FakeSource, ManualClock, Recorder
from anabranch.testing.hub import Hub
from anabranch.testing.scribe import scribe
from anabranch.testing.source import Document
from anabranch.testing.space import Recorded, Space

__all__ = [
    "Document",
    "Failure",
    "FakeDirectory",
    "FakeEmbedder",
    "FakeGenerator",
    "FakeSource",
    "Hub",
    "ManualClock",
    "Recorded",
    "Recorder",
    "Space",
    "scribe",
]
