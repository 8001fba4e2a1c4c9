"""The model that the fakes speak with: it copies a sentence out of each document and says where it stood."""

import re
from collections.abc import Sequence
from html import unescape
from itertools import islice

from anabranch.domain.model import Message

NO_ANSWER = "The documents do not contain the answer."

_DOCUMENT = re.compile(
    r"<document\b[^>]*>\s*<source>(?P<source>[^<]*)</source>.*?<content>(?P<content>.*?)</content>", re.DOTALL
)
_SENTENCE = re.compile(r".+?(?=[.!?](?:\s|$)|$)", re.DOTALL)


def scribe(messages: Sequence[Message]) -> str:
    """`First sentence [owner/slug].` for up to three of the documents in the last user message."""
    asked = next((message.content for message in reversed(messages) if message.role == "user"), "")
    sentences = [
        f"{_first_sentence(unescape(found['content']))} [{unescape(found['source']).strip()}]."
        for found in islice(_DOCUMENT.finditer(asked), 3)
        if found["content"].strip()
    ]
    return " ".join(sentences) or NO_ANSWER


def _first_sentence(text: str) -> str:
    found = _SENTENCE.match(text.strip())
    return " ".join(found[0].split()) if found else ""
