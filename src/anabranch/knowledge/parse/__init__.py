"""Files become text with its structure, in a process of their own that may die of them."""

from anabranch.knowledge.parse.builder import ParseLimits
from anabranch.knowledge.parse.dispatch import parse
from anabranch.knowledge.parse.sandbox import Sandbox

__all__ = ["ParseLimits", "Sandbox", "parse"]
