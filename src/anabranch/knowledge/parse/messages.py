"""The length-prefixed messages between Sandbox and its child process."""

import struct

import msgspec

from anabranch.domain.model import Value
from anabranch.knowledge.model import Parsed

PREFIX = struct.Struct(">I")
MAX_FRAME = 512 * 1024 * 1024
EXHAUSTED = 77  # the child's exit status if it runs out of memory


class ParseRequest(Value):
    data: bytes
    filename: str | None
    media_type: str | None


class ParseReply(Value):
    """The parsed file, or the reason why it cannot be parsed."""

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
