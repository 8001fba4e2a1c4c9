"""How many examples a property test tries: fewer in `make test`, many in `make soak`."""

import os

FACTOR = float(os.environ.get("ANABRANCH_TEST_EXAMPLES", "0.4"))


def examples(count: int) -> int:
    return max(10, round(count * FACTOR))
