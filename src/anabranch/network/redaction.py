"""Redaction: configured secrets and the caller's tokens are removed from every text that an upstream wrote."""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import cached_property
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

import msgspec

from anabranch.domain.mcp import McpServer
from anabranch.domain.model import Context, Delta, Passage, Question, SourceReply

REMOVED = "[removed]"
MAX_QUOTED = 300
# Shorter values are not removed: they are no secrets, and occur in the middle of words.
SHORTEST = 6
# Answers and documents lose only long ones: servers without keys get keys such as "ollama" or "not-needed", which are
# words that people write.
SHORTEST_IN_CONTENT = 16
LONG_PART = 20
CONFIDENTIAL = re.compile(
    r"key|token|secret|passw|auth(?!or(?!i))|credential|bearer|dsn|connection|cookie|session", re.IGNORECASE
)
PASSWORDS = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
PASSWORD_PARAMETERS = re.compile(r"[?&](?:ssl)?password=([^&\s]+)")
SEPARATORS = re.compile(r"[\s=;,@]+")
SCHEMES = frozenset({"basic", "bearer", "digest", "negotiate", "token"})
# Characters that libraries do not escape: none, those of Python, of JavaScript's encodeURIComponent and encodeURI.
SAFE_IN_URLS = ("", "/", "!'()*", ";/?:@&=+$,#!'()*")
URL_SAFE = str.maketrans("+/", "-_")


class Secrets:
    """Texts that must be removed. Their encodings are computed with the first error."""

    def __init__(self, given: Iterable[str | None] = ()) -> None:
        self.given = tuple({text for text in given if text is not None and len(text) >= SHORTEST})

    @cached_property
    def forms(self) -> tuple[str, ...]:
        """Longest first: a whole header is removed before the token in it."""
        return tuple(sorted({form for text in self.given for form in _forms(text)}, key=len, reverse=True))

    @cached_property
    def long(self) -> tuple[str, ...]:
        """Those to remove from answers and documents: plain and in JSON."""
        long = (text for text in self.given if len(text) >= SHORTEST_IN_CONTENT)
        return tuple({form for text in long for form in (text, json.dumps(text)[1:-1])})


NONE = Secrets()
# Secrets of this process by owner, until the owner forgets them.
_configured: dict[object, Secrets] = {}
# Secrets of the current question.
_callers: ContextVar[Secrets] = ContextVar("callers_secrets", default=NONE)


def learn(owner: object, given: Iterable[str | None]) -> None:
    """Remove these from now on, together with earlier ones of the owner."""
    _configured[owner] = Secrets((*_configured.get(owner, NONE).given, *given))


def forget(owner: object) -> None:
    _configured.pop(owner, None)


def learn_tokens(question: Question, context: Context) -> None:
    """Remove the tokens of this question, in this task and in tasks that it starts."""
    tokens = _tokens(question, context)
    _callers.set(Secrets(tokens) if any(tokens) else NONE)


def all_forms(question: Question, context: Context) -> tuple[str, ...]:
    """Every form of the secrets of a question and of this process, longest first."""
    found = {form for secrets in (Secrets(_tokens(question, context)), *_known()) for form in secrets.forms}
    return tuple(sorted(found, key=len, reverse=True))


def removed(text: str, own: Secrets = NONE) -> str:
    """The text without secrets. `own` are secrets that only its writer knows."""
    return _without(text, _known_forms(own))


def quoted(text: str, own: Secrets = NONE, most: int = MAX_QUOTED) -> str:
    """An upstream's message in one line of limited length, without secrets."""
    clean = removed(text[: 4 * most], own) if len(text) >= SHORTEST else text
    if len(text) > 4 * most:
        clean = _without_end(clean, _known_forms(own))
    line = " ".join("".join(character if character.isprintable() else " " for character in clean).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def reply_of(reply: SourceReply) -> SourceReply:
    """A source's reply without secrets in its error and passages."""
    if reply.error is not None:
        reply = msgspec.structs.replace(reply, error=removed(reply.error))
    if reply.passages and (long := in_content()):
        # Nearly always there is none, and one long text is searched faster than many short ones.
        whole = "".join([f"{one.title}\0{one.text}\0{one.url}\0{one.document_id}\0" for one in reply.passages])
        if any(text in whole for text in long):
            reply = msgspec.structs.replace(reply, passages=tuple(_cleared(one, long) for one in reply.passages))
    return reply


def content_of(text: str) -> str:
    """The output of a subagent without secrets."""
    return _without(text, in_content())


def delta_of(delta: Delta, long: tuple[str, ...]) -> Delta:
    """A part of an answer without secrets. A secret split over several parts is not found: waiting for the next part
    would slow down every answer, and a server that wants to hide a key in its answer can do so in many ways."""
    if len(delta.text) < SHORTEST_IN_CONTENT:
        return delta
    return msgspec.structs.replace(delta, text=_without(delta.text, long))


def in_content() -> tuple[str, ...]:
    """The texts to remove from answers and documents: each takes about 4 µs for 10 KB."""
    found = _callers.get().long
    for secrets in _configured.values():
        found += secrets.long
    return found


def of_server(server: McpServer, *, certain: bool = False) -> Iterator[str]:
    """Secrets in a server's configuration: variables, headers, options and URL. Everything that may be one, for the
    server's own messages; with `certain` only values with the name of a secret, for texts of all upstreams."""
    named = [*server.env.items(), *server.headers.items(), *_options(server.args)]
    if server.url is not None:
        address = urlsplit(server.url)
        named += parse_qsl(address.query)
        named += [("", part) for part in address.path.split("/") if len(part) >= LONG_PART]
    for name, value in named:
        yield from PASSWORDS.findall(value)
        if not certain or CONFIDENTIAL.search(name):
            yield from secret_parts(value)
        if not certain:
            yield from (part for part in SEPARATORS.split(value) if part.lower() not in SCHEMES)


def _tokens(question: Question, context: Context) -> list[str | None]:
    tokens = [context.bearer, *context.tokens.values(), *context.transactions.values()]
    return tokens + [endpoint.token for endpoint in (*question.sources, question.model) if endpoint is not None]


def _known() -> tuple[Secrets, ...]:
    return (_callers.get(), *_configured.values())


def _known_forms(own: Secrets) -> Iterator[str]:
    return (form for secrets in (own, *_known()) for form in secrets.forms)


def _options(args: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """`--name=value`, `--token value`, and what looks like an address with a password."""
    for before, arg in zip(("", *args), args, strict=False):
        if arg.startswith("-"):
            name, _, value = arg.partition("=")
            yield name, value
        elif (before.startswith("-") and CONFIDENTIAL.search(before)) or ("://" in arg and "@" in arg):
            yield before, arg


def secret_parts(value: str) -> Iterator[str]:
    """The whole value of a header, the token in it, and the password in that."""
    for text in {value, unquote(value)}:
        yield text
        yield from (part for part in text.split() if part.lower() not in SCHEMES)
        scheme, _, coded = text.partition(" ")
        if scheme.lower() == "basic":
            with suppress(ValueError):
                pair = b64decode(coded + "==").decode()
                yield from (pair, pair.partition(":")[2])


def _forms(text: str) -> Iterator[str]:
    """Plain, in a URL, in JSON, and inside base64, where it may start at any of three positions."""
    raw = text.encode(errors="replace")
    yield text
    for in_url in (quote_plus(raw), *(quote(raw, safe=safe) for safe in SAFE_IN_URLS)):
        yield from (in_url, re.sub("%..", lambda found: found[0].lower(), in_url))
    for ascii_only in (True, False):
        in_json = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield from (in_json, in_json.replace("/", "\\/"))
    for before in range(3):
        # Characters at both ends also contain bits of the neighbouring bytes.
        first, last = (8 * before + 5) // 6, 8 * (before + len(raw)) // 6
        coded = b64encode(bytes(before) + raw).decode()[first:last]
        yield from (coded, coded.translate(URL_SAFE))


def _without(text: str, forms: Iterable[str]) -> str:
    for form in forms:
        if form in text:
            text = text.replace(form, REMOVED)
    return text


def _without_end(text: str, forms: Iterable[str]) -> str:
    """For a truncated text, which may end in the middle of a secret."""
    for form in forms:
        at = text.find(form[:SHORTEST], max(0, len(text) - len(form)))
        while at >= 0:
            if form.startswith(text[at:]):
                return text[:at] + REMOVED
            at = text.find(form[:SHORTEST], at + 1)
    return text


def _cleared(passage: Passage, long: tuple[str, ...]) -> Passage:
    texts = {name: getattr(passage, name) for name in ("title", "text", "url", "document_id")}
    return msgspec.structs.replace(passage, **{name: text and _without(text, long) for name, text in texts.items()})
