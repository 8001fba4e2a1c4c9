"""The web page at `/`, with its files, and a description of the server for clients that ask for JSON."""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from anabranch.domain.errors import NotFound
from anabranch.domain.model import Value
from anabranch.entrypoints.http.errors import PLAIN
from anabranch.entrypoints.http.operations import JSON, Call, Operation, Reply, header, unless_known

MEDIA_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
INDEX = "index.html"
# Scripts, styles and requests of this origin only. Nothing inline is run, and no string becomes HTML or a script.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    # A browser asks again each time, and gets 304 while nothing has changed: a new version is used at once.
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
]


class Description(Value):
    """What this server is, and where to go on."""

    service: str
    version: str
    description: str
    links: dict[str, str]


class PageFile(NamedTuple):
    body: bytes
    media_type: bytes


@cache
def page_files() -> dict[str, PageFile]:
    """The files of the page, by name."""
    folder = files("anabranch.web").joinpath("page")
    found = {}
    for entry in folder.iterdir():
        suffix = entry.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            found[entry.name] = PageFile(entry.read_bytes(), MEDIA_TYPES[suffix])
    return found


@dataclass(frozen=True)
class PageSurface:
    """The page holds no data: everything that it shows comes from the API, with the permissions of its user."""

    def operations(self) -> list[Operation[Any]]:
        return [
            Operation(
                "GET",
                "/",
                "page",
                "The web page; with `Accept: application/json` a description of this server",
                self._page,
                PLAIN,
                scope=None,
                response_types=(Description,),
                other_media_types=("text/html",),
                statuses={200: "The page, or the description.", 304: "The page has not changed."},
            ),
            Operation(
                "GET",
                "/page/{file}",
                "page_file",
                "A file of the web page",
                self._file,
                PLAIN,
                scope=None,
                media_type="text/javascript",
                response_types=(str,),
                other_media_types=("text/html", "text/css", "image/svg+xml"),
                statuses={200: "The file.", 304: "It has not changed."},
                errors=(404,),
            ),
        ]

    async def _page(self, call: Call[None]) -> Reply:
        accept = (header(call.scope, b"accept") or "").lower()
        if "application/json" in accept and "text/html" not in accept:
            return Reply(msgspec.json.encode(_description()), 200, [JSON, (b"vary", b"accept")])
        return _sent(call, page_files()[INDEX])

    async def _file(self, call: Call[None]) -> Reply:
        name = call.params["file"]
        if (found := page_files().get(name)) is None:
            raise NotFound(f"The page has no file {name[:100]!r}.")
        return _sent(call, found)


def _sent(call: Call[None], file: PageFile) -> Reply:
    return unless_known(call, file.body, [(b"content-type", file.media_type), *HEADERS])


def _description() -> Description:
    return Description(
        service="anabranch",
        version=version("anabranch"),
        description="Sends one question to many sources in parallel and returns one answer with citations.",
        links={
            "page": "/",
            "openapi": "/openapi.json",
            "health": "/health",
            "chat": "/api/v1/chat",
            "query": "/v1/query",
            "collections": "/v1/collections",
            "mcp": "/mcp",
            "openai": "/v1/chat/completions",
        },
    )
