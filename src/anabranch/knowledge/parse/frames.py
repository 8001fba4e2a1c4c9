"""What Sandbox and its child say to each other: messages, each behind its length."""

import struct

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.text import Parsed

PREFIX = struct.Struct(">I")
MAX_FRAME = 512 * 1024 * 1024
EXHAUSTED = 77  # how the child exits when its memory is not enough


class Request(Value):
    data: bytes
    filename: str | None
    media_type: str | None


class Reply(Value):
    """Either what the file says or why it cannot."""

    parsed: Parsed | None = None
    reason: str = ""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def framed(message: Request | Reply) -> bytes:
    body = _encoder.encode(message)
    return PREFIX.pack(len(body)) + body


def request_from(body: bytes) -> Request:
    return _requests.decode(body)


def reply_from(body: bytes) -> Reply:
    return _replies.decode(body)
