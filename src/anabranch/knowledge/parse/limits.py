"""How large a file may be, and what it may cost."""

from anabranch.domain.model import Value
from anabranch.knowledge.parsed import Unprocessable

MIB = 1024 * 1024


class ParseLimits(Value):
    """`max_expanded` is what an archive such as a DOCX may unpack to, `max_memory` what its parser may hold; both are
    bytes, as `max_bytes` is. `max_text` counts characters."""

    max_bytes: int = 50 * MIB
    max_pages: int = 2_000
    max_text: int = 20_000_000
    max_expanded: int = 200 * MIB
    timeout_s: float = 120.0
    max_memory: int = 2048 * MIB


def mebibytes(count: int) -> str:
    return f"{count / MIB:,.0f} MiB" if count >= MIB else f"{count:,} bytes"


def check_size(data: bytes, limits: ParseLimits) -> None:
    if len(data) > limits.max_bytes:
        raise Unprocessable(
            f"The file has {mebibytes(len(data))}, more than the limit of {mebibytes(limits.max_bytes)}. Split it."
        )
