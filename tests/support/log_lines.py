"""A log whose events a test can read."""

import io
import json
import logging

from anabranch.telemetry.log import Log, json_line


class Lines:
    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.log = Log(self._stream, logging.INFO, json_line)

    @property
    def events(self) -> list[str]:
        self.log.flush()
        return [json.loads(line)["event"] for line in self._stream.getvalue().splitlines()]
