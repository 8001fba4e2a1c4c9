"""Cursors: places in a list that a client can hand back, and which do not show the keys that count all documents."""

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
        """The key, or None for what is no cursor of these records."""
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
    """The records' own, the same for all processes."""
    db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (FACT, secrets.token_hex(32)))
    made = find(db)
    assert made is not None
    return made


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
