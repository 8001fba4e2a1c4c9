"""Parsers: files to structured text, in separate processes that may crash and can reach nothing."""

from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.dispatch import parse
from anabranch.knowledge.parse.parsers import Parsers, restrictions
from anabranch.knowledge.parse.sandbox import Sandbox

__all__ = ["ParseLimits", "Parsers", "Sandbox", "parse", "restrictions"]
