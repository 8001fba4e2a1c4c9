"""The signing side of a stub hub: RSA keys that it rotates, tokens that it signs, keys that it publishes."""

import time
from collections.abc import Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

BITS = 2048


class Signer:
    """Keys are named key-1, key-2, …; the last one signs, and what is published are those that were not dropped."""

    def __init__(self) -> None:
        self._keys: dict[str, rsa.RSAPrivateKey] = {}
        self._made = 0

    @property
    def key_id(self) -> str:
        if not self._keys:
            self.rotate()
        return next(reversed(self._keys))

    def rotate(self, *, keep: bool = False) -> str:
        """A new key, which signs from now on; with `keep` the old ones stay published."""
        if not keep:
            self._keys.clear()
        self._made += 1
        name = f"key-{self._made}"
        self._keys[name] = rsa.generate_private_key(public_exponent=65537, key_size=BITS)
        return name

    def public_keys(self) -> list[dict[str, Any]]:
        """As a JWKS has them."""
        _ = self.key_id
        make = jwt.algorithms.RSAAlgorithm.to_jwk
        return [
            {**make(key.public_key(), as_dict=True), "kid": name, "alg": "RS256", "use": "sig"}
            for name, key in self._keys.items()
        ]

    def sign(self, claims: Mapping[str, Any], headers: Mapping[str, Any] | None = None) -> str:
        """These claims and no others, signed."""
        key = self._keys[self.key_id]
        return jwt.encode(dict(claims), key, algorithm="RS256", headers={"kid": self.key_id, **(headers or {})})

    def token(self, audience: str, expires_s: float, claims: Mapping[str, Any]) -> str:
        now = int(time.time())
        return self.sign({"aud": audience, "iat": now, "exp": now + expires_s, **claims})
