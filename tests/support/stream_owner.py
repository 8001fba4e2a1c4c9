"""A worker in a process of its own that writes two streams, one after the other, until it is stopped: a program."""

import asyncio
import sys

from anabranch.domain.errors import LeaseLost, StreamUnavailable
from anabranch.domain.eventlog import Entry
from support.shared_log import Worker, worker


async def appended(owner: Worker, stream: str, token: str, one: Entry) -> bool:
    """False if Redis has to confirm the owner first, which the log asks for after a pause: then try again."""
    try:
        await owner.log.append(stream, token, [one])
    except StreamUnavailable:
        await asyncio.sleep(0.005)
        return False
    return True


async def write(url: str, lease_s: float) -> None:
    async with worker(url, name="owner", lease_s=lease_s) as owner:
        for stream in ("first", "second"):
            token = await owner.log.open(stream, identity="")
            number = 0
            try:
                while True:
                    number += 1
                    one = Entry(key=str(number), revision=1, body=str(number).encode())
                    while not await appended(owner, stream, token, one):
                        pass
                    await asyncio.sleep(0.005)
            except LeaseLost:
                page = await owner.log.read(stream, 0, 100_000)
                sys.stdout.write(f"lost {stream} {page.head} {page.entries[-1].body.decode()}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], float(sys.argv[2])))
