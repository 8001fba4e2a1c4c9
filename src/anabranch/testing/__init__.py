"""Public fakes: a real Space and Hub to talk to, and stand-ins for the domain's contracts."""

from anabranch.testing.embedder import FakeEmbedder
from anabranch.testing.failures import Failure
from anabranch.testing.fakes import FakeDirectory, FakeGenerator, FakeSource, ManualClock, Recorder
from anabranch.testing.hub import Hub
from anabranch.testing.quoting_model import scribe
from anabranch.testing.source import Document
from anabranch.testing.space import Recorded, Space
from anabranch.testing.subagents import Crumbs, FakeSubagent, FakeSubagents, ManualAlarms

__all__ = [
    "Crumbs",
    "Document",
    "Failure",
    "FakeDirectory",
    "FakeEmbedder",
    "FakeGenerator",
    "FakeSource",
    "FakeSubagent",
    "FakeSubagents",
    "Hub",
    "ManualAlarms",
    "ManualClock",
    "Recorded",
    "Recorder",
    "Space",
    "scribe",
]
