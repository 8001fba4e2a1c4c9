"""Cursors: encrypted positions in a list, which do not disclose the document keys."""

import hmac
import secrets
import sqlite3
from base64 import urlsafe_b64decode, urlsafe_b64encode

FACT = "cursor_secret"
WIDTH = 8


class Cursors:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sealed(self, key: int) -> str:
        nonce = secrets.token_bytes(WIDTH)
        hidden = _xor(key.to_bytes(WIDTH, "big"), self._digest(b"pad", nonce))
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
        return int.from_bytes(_xor(hidden, self._digest(b"pad", nonce)), "big")

    def _digest(self, use: bytes, of: bytes) -> bytes:
        return hmac.digest(self._secret, use + of, "sha256")[:WIDTH]


def find(db: sqlite3.Connection) -> Cursors | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (FACT,)).fetchone()
    return Cursors(bytes.fromhex(row[0])) if row else None


def make(db: sqlite3.Connection) -> Cursors:
    """The cursors of these records; their secret is stored, so all processes share it."""
    db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (FACT, secrets.token_hex(32)))
    made = find(db)
    assert made is not None
    return made


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
