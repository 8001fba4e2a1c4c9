"""Settings as a person gives them, by variables, and what is opened or served with them."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from anabranch import Anabranch, Settings
from anabranch.configuration.settings import PREFIX, load
from conftest import Server, running

LOCAL = "127.0.0.0/8"


def loaded(**variables: str) -> Settings:
    return load({PREFIX + name: value for name, value in variables.items()})


@asynccontextmanager
async def served(**variables: str) -> AsyncIterator[Server]:
    """A server that has read these variables; loopback endpoints are allowed unless they say otherwise."""
    given = {"ENDPOINT_ALLOWLIST": LOCAL, "LOG_LEVEL": "ERROR", **variables}
    async with running(loaded(**given)) as server:
        yield server


def opened(**variables: str) -> AbstractAsyncContextManager[Anabranch]:
    return Anabranch.open(settings=loaded(**{"ENDPOINT_ALLOWLIST": LOCAL, **variables}))
