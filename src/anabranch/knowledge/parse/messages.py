"""What Sandbox and its child say to each other: messages, each behind its length."""

import struct

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.parsed import Parsed

PREFIX = struct.Struct(">I")
MAX_FRAME = 512 * 1024 * 1024
EXHAUSTED = 77  # how the child exits when its memory is not enough


class ParseRequest(Value):
    data: bytes
    filename: str | None
    media_type: str | None


class ParseReply(Value):
    """Either what the file says or why it cannot."""

    parsed: Parsed | None = None
    reason: str = ""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(ParseRequest)
_replies = msgspec.msgpack.Decoder(ParseReply)


def framed(message: ParseRequest | ParseReply) -> bytes:
    body = _encoder.encode(message)
    return PREFIX.pack(len(body)) + body


def request_from(body: bytes) -> ParseRequest:
    return _requests.decode(body)


def reply_from(body: bytes) -> ParseReply:
    return _replies.decode(body)
