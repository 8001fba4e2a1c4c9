"""What it costs to rank and thin out what ten servers return: 1,000 results of 200 to 2,000 characters, CPU only."""

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from statistics import median

from rapidfuzz.distance import Levenshtein
from rich.console import Console

from anabranch.domain.model import Passage, SourceReply, Status
from anabranch.domain.ranking import Ranking
from anabranch.pipeline.dedup import Distinct
from anabranch.pipeline.scoring import Ranker
from benchmarks.report import LimitedFigure, show_limited

SERVERS, RESULTS = 10, 100
SHORTEST, LONGEST = 200, 2_000
REPEATED, CHANGED = 0.3, 0.3
VOCABULARY = 20_000
LIMIT, THRESHOLD = 30, 0.8
NOW, YEAR = 1_750_000_000.0, 365 * 86_400.0
MAX_TOP_MS, MAX_FULL_MS = 100.0, 300.0
# As often as the letters of English, so that unrelated texts are as far from each other as they would be.
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
FREQUENCIES = (127, 91, 82, 75, 70, 67, 63, 61, 60, 43, 40, 28, 28, 24, 24, 22, 20, 20, 19, 15, 10, 8, 2, 2, 1, 1)


def texts(chance: random.Random) -> Iterator[str]:
    """Words by Zipf's law, the common ones short; three in ten texts are an earlier one with some words changed."""
    words = [
        "".join(chance.choices(LETTERS, FREQUENCIES, k=max(1, round(chance.gauss(2 + 0.55 * math.log(n + 1), 1.5)))))
        for n in range(VOCABULARY)
    ]
    weights = [1 / (n + 2.7) for n in range(VOCABULARY)]
    made: list[list[str]] = []
    for _ in range(SERVERS * RESULTS):
        if made and chance.random() < REPEATED:
            rate = chance.random() * CHANGED
            said = [chance.choice(words) if chance.random() < rate else word for word in chance.choice(made)]
        else:
            said = " ".join(chance.choices(words, weights, k=LONGEST))[: chance.randint(SHORTEST, LONGEST)].split(" ")
        made.append(said)
        yield " ".join(said)[:LONGEST]


def replies(chance: random.Random) -> list[SourceReply]:
    found = [
        Passage(
            source=f"server-{n % SERVERS}", title=text[:40], text=text, score=0.0, date=NOW - chance.random() * YEAR
        )
        for n, text in enumerate(texts(chance))
    ]
    return [
        SourceReply(path=f"server-{n}", status=Status.SUCCESS, passages=tuple(found[n::SERVERS]))
        for n in range(SERVERS)
    ]


def ranked(question: str, arrived: Sequence[SourceReply]) -> tuple[Passage, ...]:
    ranker = Ranker(question, Ranking(now=NOW))
    for index, reply in enumerate(arrived):
        ranker.read(index, reply)
    return ranker.ranked()


def plainly(found: Sequence[str], limit: int | None = None) -> list[int]:
    """The definition, one pair after the other; each distance may stop once it is too large."""
    kept: list[int] = []
    for index, text in enumerate(found):
        if not any(_similar(text, found[one]) for one in kept):
            kept.append(index)
            if len(kept) == limit:
                break
    return kept


def _similar(one: str, other: str) -> bool:
    longer = max(len(one), len(other))
    distance = Levenshtein.distance(one, other, score_cutoff=int((1 - THRESHOLD) * longer) + 2)
    return one == other or 1 - distance / longer > THRESHOLD


def quickly(found: Sequence[str], limit: int | None = None) -> list[int]:
    return list(islice(Distinct(found, THRESHOLD), limit))


def top(question: str, arrived: Sequence[SourceReply]) -> list[int]:
    return quickly([passage.text for passage in ranked(question, arrived)], LIMIT)


def measured(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """In turns, so that noise falls on all of them."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            started = time.process_time()
            task()
            taken[name].append((time.process_time() - started) * 1000)
    return {name: median(each) for name, each in taken.items()}


def figures(rounds: int) -> list[LimitedFigure]:
    chance = random.Random(1)
    arrived = replies(chance)
    words = arrived[0].passages[0].text.split()
    question, long_question = " ".join(words[:8]), " ".join(passage.text for passage in arrived[0].passages)[:10_000]
    found = [passage.text for passage in ranked(question, arrived)]
    if quickly(found) != plainly(found):
        raise RuntimeError("What is kept is not what the definition keeps.")
    bounds = {f"rank, best {LIMIT}": MAX_TOP_MS, f"rank, best {LIMIT}, long question": MAX_TOP_MS, "all": MAX_FULL_MS}
    tasks: dict[str, Callable[[], object]] = {
        "rank": partial(ranked, question, arrived),
        f"best {LIMIT}": partial(quickly, found, LIMIT),
        f"best {LIMIT}, plainly": partial(plainly, found, LIMIT),
        f"rank, best {LIMIT}": partial(top, question, arrived),
        f"rank, best {LIMIT}, long question": partial(top, long_question, arrived),
        "all": partial(quickly, found),
        "all, plainly": partial(plainly, found),
    }
    taken = measured(tasks, rounds)
    return [LimitedFigure(name=name, ms=ms, must_be_below_ms=bounds.get(name)) for name, ms in taken.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    title = f"{SERVERS} servers, {RESULTS} results each, of {SHORTEST} to {LONGEST:,} characters"
    show_limited(Console(), title, "CPU ms", figures(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
