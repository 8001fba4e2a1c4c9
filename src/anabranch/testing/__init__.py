"""Test doubles: a real Space and Hub to send requests to, and fakes of the domain's contracts."""

from anabranch.domain.playback import RecordedClock, RecordedDirectory, RecordedEvidence
from anabranch.testing.failures import Failure
from anabranch.testing.fakes import (
    Crumbs,
    FakeDirectory,
    FakeEmbedder,
    FakeEvidence,
    FakeGenerator,
    FakeSource,
    FakeSubagent,
    FakeSubagents,
    ManualAlarms,
    ManualClock,
    Recorder,
    ScriptedGenerator,
)
from anabranch.testing.hub import Hub
from anabranch.testing.injection_models import ignoring, obeying
from anabranch.testing.model import scribe
from anabranch.testing.recordings import load_recording
from anabranch.testing.source import Document
from anabranch.testing.space import Recorded, Space

__all__ = [
    "Crumbs",
    "Document",
    "Failure",
    "FakeDirectory",
    "FakeEmbedder",
    "FakeEvidence",
    "FakeGenerator",
    "FakeSource",
    "FakeSubagent",
    "FakeSubagents",
    "Hub",
    "ManualAlarms",
    "ManualClock",
    "Recorded",
    "RecordedClock",
    "RecordedDirectory",
    "RecordedEvidence",
    "Recorder",
    "ScriptedGenerator",
    "Space",
    "ignoring",
    "load_recording",
    "obeying",
    "scribe",
]
