"""Steps of a planner, as a client sends them."""

import asyncio
from collections.abc import Callable
from typing import Any

from conftest import Server

STEPS = "/planner/sessions/s/steps"
Said = tuple[int, dict[str, Any]]


async def post(server: Server, path: str, body: object) -> Said:
    async with server.session.post(server.url + path, json=body) as response:
        return response.status, await response.json()


async def begin(server: Server, step: str, *expected: dict[str, Any], **more: Any) -> Said:
    subagents = list(expected) or [{"key": "notes"}]
    return await post(server, STEPS, {"plan_step_id": step, "expected_subagents": subagents, **more})


async def push(server: Server, step: str, status: str = "success", key: str = "notes", **more: Any) -> Said:
    return await post(server, f"{STEPS}/{step}/subagents/{key}/events", {"status": status, **more})


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110  a server is asked from outside
            await asyncio.sleep(0.02)
