"""What a reply has found, read without holding up others. It imports the SDK, so it is loaded late."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from mcp_types import CallToolResult

from anabranch.domain.model import Passage
from anabranch.domain.servers import McpServer
from anabranch.sources.mcp.results import is_large, passages

# Of their own: whoever searches, embeds or counts needs the others.
READERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mcp")


async def found(answer: CallToolResult, server: McpServer, within_s: float) -> tuple[Passage, ...]:
    if not is_large(answer):
        return passages(answer, server)
    async with asyncio.timeout(max(0.0, within_s)):
        return await asyncio.get_running_loop().run_in_executor(READERS, passages, answer, server)
