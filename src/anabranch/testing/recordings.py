"""Recorded runs as fixtures."""

from pathlib import Path

from anabranch.domain.recording import MAX_BYTES, Recording, decode


def load_recording(path: Path | str) -> Recording:
    """The run that `anabranch ask --record` has recorded. Its replies, the model's stream and the evidence model's
    results are contracts again with `RecordedDirectory` and `RecordedEvidence`. RecordingError if it cannot be read."""
    with Path(path).open("rb") as file:
        return decode(file.read(MAX_BYTES + 1))
