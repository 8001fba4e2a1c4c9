"""Encryption of backups in the age format, for recipients or with a passphrase."""

from pathlib import Path
from typing import BinaryIO

from anabranch.configuration.extras import require
from anabranch.domain.errors import ConfigurationError
from anabranch.domain.model import Value
from anabranch.knowledge.durable_files import regular

HEADER = b"age-encryption.org/v1\n"
WITH_PASSPHRASE = b"-> scrypt "
# With a passphrase, the library holds the file in memory twice.
MAX_PASSPHRASE_BYTES = 1 << 30
NEEDED_BY = "An encrypted backup"


class Encryption(Value):
    """For whom a backup is encrypted: age recipients (`age1…`), or whoever knows the passphrase; or nobody."""

    recipients: tuple[str, ...] = ()
    passphrase: str | None = None

    def __bool__(self) -> bool:
        return bool(self.recipients) or self.passphrase is not None

    def check(self) -> None:
        """Raise ConfigurationError if nothing can be encrypted like this."""
        if self.recipients and self.passphrase is not None:
            raise ConfigurationError("A backup is encrypted for recipients or with a passphrase, not with both.")
        if self.passphrase == "":
            raise ConfigurationError("The passphrase is empty.")
        if self:
            require("encryption", NEEDED_BY)
            _recipients(self.recipients)

    def encrypt(self, source: BinaryIO, target: BinaryIO) -> None:
        import pyrage  # noqa: PLC0415  an optional dependency

        if self.passphrase is None:
            pyrage.encrypt_io(source, target, _recipients(self.recipients))
            return
        content = source.read(MAX_PASSPHRASE_BYTES + 1)
        if len(content) > MAX_PASSPHRASE_BYTES:
            raise ConfigurationError("Records of more than 1 GiB are encrypted with --encrypt-to, not a passphrase.")
        target.write(pyrage.passphrase.encrypt(content, self.passphrase))


class Decryption(Value):
    """What opens encrypted backups: age identities (`AGE-SECRET-KEY-1…`), or a passphrase; or nothing."""

    identities: tuple[str, ...] = ()
    passphrase: str | None = None

    def __bool__(self) -> bool:
        return bool(self.identities) or self.passphrase is not None

    def decrypt(self, source: Path, target: BinaryIO) -> None:
        if not self:
            raise ConfigurationError(
                f"{source} is encrypted. Name its key with --identity FILE, or its passphrase with --passphrase-file "
                f"FILE or AGGREGATOR_BACKUP_PASSPHRASE."
            )
        if not self.identities and needs_identity(source):
            raise ConfigurationError(
                f"{source} is encrypted for recipients, not with a passphrase. Name its key with --identity FILE."
            )
        require("encryption", NEEDED_BY)
        import pyrage  # noqa: PLC0415  an optional dependency

        try:
            with source.open("rb") as file:
                if self.identities:
                    pyrage.decrypt_io(file, target, [_identity(one) for one in self.identities])
                else:
                    target.write(pyrage.passphrase.decrypt(file.read(), self.passphrase or ""))
        except (pyrage.DecryptError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # the disk; the library's own errors have no number
                raise
            given = "the identity" if self.identities else "the passphrase"
            raise ConfigurationError(
                f"{source} cannot be decrypted: {given} is not the right one, or the file is damaged."
            ) from None


def is_encrypted(file: Path) -> bool:
    with open(file, "rb", opener=regular) as opened:
        return opened.read(len(HEADER)) == HEADER


def needs_identity(file: Path) -> bool:
    """Whether an encrypted file is for recipients, not for whoever knows a passphrase."""
    with open(file, "rb", opener=regular) as opened:
        opened.seek(len(HEADER))
        return opened.read(len(WITH_PASSPHRASE)) != WITH_PASSPHRASE


def _recipients(given: tuple[str, ...]) -> list[object]:
    import pyrage  # noqa: PLC0415  an optional dependency

    try:
        return [pyrage.x25519.Recipient.from_str(one) for one in given]
    except pyrage.RecipientError:
        raise ConfigurationError(
            "A recipient is the public key that age-keygen prints: age1… (not the secret key)."
        ) from None


def _identity(given: str) -> object:
    import pyrage  # noqa: PLC0415  an optional dependency

    try:
        return pyrage.x25519.Identity.from_str(given)
    except pyrage.IdentityError:
        raise ConfigurationError(
            "An identity file has the secret keys that age-keygen prints: AGE-SECRET-KEY-1…"
        ) from None
