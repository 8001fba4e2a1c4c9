"""The cursors of lists."""

import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Literal

from anabranch.knowledge.records.database import Session
from anabranch.knowledge.records.facts import fact, set_fact

FACT = "cursor_secret"
WIDTH = 8
ListName = Literal["documents", "chunks", "queries", "feedback", "audit"]


class Cursors:
    """Encrypts the keys of one list, so that a cursor does not say how many entries others have. In another list it is
    not valid: a caller can choose the position in a list of its own, such as the chunks of a document."""

    def __init__(self, secret: bytes, of: ListName) -> None:
        self._secret = secret
        self._list = of.encode()

    def sealed(self, key: int) -> str:
        nonce = secrets.token_bytes(WIDTH)
        hidden = (key ^ int.from_bytes(self._digest(b"pad", nonce), "big")).to_bytes(WIDTH, "big")
        return urlsafe_b64encode(nonce + hidden + self._digest(b"tag", nonce + hidden)).decode()

    def opened(self, cursor: str) -> int | None:
        """The key of a cursor; None if it is not valid for this list."""
        try:
            raw = urlsafe_b64decode(cursor)
        except ValueError:
            return None
        nonce, hidden, tag = raw[:WIDTH], raw[WIDTH : 2 * WIDTH], raw[2 * WIDTH :]
        if len(raw) != 3 * WIDTH or not hmac.compare_digest(tag, self._digest(b"tag", nonce + hidden)):
            return None
        return int.from_bytes(hidden, "big") ^ int.from_bytes(self._digest(b"pad", nonce), "big")

    def _digest(self, use: bytes, of: bytes) -> bytes:
        return hmac.digest(self._secret, use + b":" + self._list + b":" + of, "sha256")[:WIDTH]


def existing(db: Session, of: ListName) -> Cursors | None:
    """The cursors of a list; their secret is stored, so all processes share it."""
    secret = fact(db, FACT)
    return None if secret is None else Cursors(bytes.fromhex(secret), of)


def create(db: Session, of: ListName) -> Cursors:
    if (found := existing(db, of)) is not None:
        return found
    set_fact(db, FACT, secret := secrets.token_hex(32))
    return Cursors(bytes.fromhex(secret), of)
