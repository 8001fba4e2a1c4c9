"""What an API key may do: scopes, and the collections and configured endpoints that it may use."""

from collections.abc import Mapping
from typing import Literal, get_args

from anabranch.domain.errors import Forbidden
from anabranch.domain.model import Endpoint, Value

# `ask`: questions on every surface, with their streams and ratings. `read`: collections, documents, jobs, the query log
# and sources. `ingest`: changes collections and documents. `admin`: keys, sources and metrics, for operators.
Scope = Literal["ask", "read", "ingest", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
# Grants besides `source:NAME`, `mcp:NAME` and `model:NAME`: all that is configured, now or later, and the planner.
ALL, PLANNER = "all", "planner"


class Grants(Value):
    """The endpoints of the operator's configuration that a caller may name."""

    names: tuple[str, ...] = (ALL,)

    def permits(self, grant: str) -> bool:
        return ALL in self.names or grant in self.names

    def sources(self, known: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Those that may be used. Collections are never refused here: they have permissions of their own."""
        return {name: one for name, one in known.items() if one.kind == "collection" or self.permits(_grant(name, one))}

    def models(self, known: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Those that may be used."""
        return {name: one for name, one in known.items() if self.permits(grant_of_model(name))}

    def server(self, name: str) -> bool:
        """Whether this MCP server may be used."""
        return self.permits(f"mcp:{name}")


EVERY_GRANT = Grants()
NO_GRANT = Grants(names=())


class Rights(Value):
    """The rights of a key. `collections` (keys of the records) and `grants` are None where nothing is restricted; then
    the settings say who may use configured endpoints. `limits` are numbers by the name of a limit."""

    scopes: tuple[Scope, ...] = SCOPES
    collections: tuple[int, ...] | None = None
    grants: Grants | None = None
    limits: Mapping[str, float] = {}

    def require(self, scope: Scope) -> None:
        if scope not in self.scopes:
            raise Forbidden(
                f"This API key lacks the scope {scope}, which this needs; it has {', '.join(self.scopes)}.",
                missing_scope=scope,
            )

    def permits(self, grant: str) -> bool:
        """Whether nothing restricts the key to others."""
        return self.grants is None or self.grants.permits(grant)


# The rights of callers without an API key: their identity alone says what they may do.
UNRESTRICTED = Rights()


def grant_of_model(name: str) -> str:
    return f"model:{name}"


def _grant(name: str, source: Endpoint) -> str:
    return f"{'mcp' if source.kind == 'mcp' else 'source'}:{name}"
