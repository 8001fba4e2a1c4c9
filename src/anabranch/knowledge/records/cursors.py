"""The cursors of lists."""

import hmac
import secrets
import sqlite3
from base64 import urlsafe_b64decode, urlsafe_b64encode

from anabranch.knowledge.records.facts import fact, set_fact

FACT = "cursor_secret"
WIDTH = 8


class Cursors:
    """Encrypts keys, so that a cursor does not say how many documents there are."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sealed(self, key: int) -> str:
        nonce = secrets.token_bytes(WIDTH)
        hidden = (key ^ int.from_bytes(self._digest(b"pad", nonce), "big")).to_bytes(WIDTH, "big")
        return urlsafe_b64encode(nonce + hidden + self._digest(b"tag", nonce + hidden)).decode()

    def opened(self, cursor: str) -> int | None:
        """The key of a cursor; None if it is not valid for these records."""
        try:
            raw = urlsafe_b64decode(cursor)
        except ValueError:
            return None
        nonce, hidden, tag = raw[:WIDTH], raw[WIDTH : 2 * WIDTH], raw[2 * WIDTH :]
        if len(raw) != 3 * WIDTH or not hmac.compare_digest(tag, self._digest(b"tag", nonce + hidden)):
            return None
        return int.from_bytes(hidden, "big") ^ int.from_bytes(self._digest(b"pad", nonce), "big")

    def _digest(self, use: bytes, of: bytes) -> bytes:
        return hmac.digest(self._secret, use + of, "sha256")[:WIDTH]


def existing(db: sqlite3.Connection) -> Cursors | None:
    """The cursors of these records; their secret is stored, so all processes share it."""
    secret = fact(db, FACT)
    return None if secret is None else Cursors(bytes.fromhex(secret))


def create(db: sqlite3.Connection) -> Cursors:
    if (found := existing(db)) is not None:
        return found
    set_fact(db, FACT, secret := secrets.token_hex(32))
    return Cursors(bytes.fromhex(secret))
