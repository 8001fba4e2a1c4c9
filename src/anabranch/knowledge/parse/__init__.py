"""Parsers: files to structured text, in a separate process that may crash."""

from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.dispatch import parse
from anabranch.knowledge.parse.sandbox import Sandbox

__all__ = ["ParseLimits", "Sandbox", "parse"]
