"""Cross-encoders, local and remote: a score for each passage, in their order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from anabranch.domain.contracts import Reranker
from anabranch.domain.errors import ConfigurationError, RerankFailed
from anabranch.domain.model import Passage
from anabranch.models.remote import ModelServer
from anabranch.models.rerankers import Form, OnnxCrossEncoder, RerankEndpoint, rerank_url
from support.model_servers import Served, served

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "river", "delta", "bread", "oven")
FORMS: tuple[Form, ...] = ("cohere", "tei")


def passages(*texts: str) -> list[Passage]:
    return [Passage(source="s", title="t", text=text, score=0.0) for text in texts]


def tokenizer(folder: Path) -> None:
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    # As many models ship: cut and padded to one length.
    made.enable_padding(length=64)
    made.enable_truncation(64)
    made.save(str(folder / "tokenizer.json"))


def cross_encoder(
    folder: Path,
    *,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids"),
    kind: int = TensorProto.INT64,
    logits: int = 1,
) -> Path:
    """Its score is how much "river" the passage has, in tokens that count: the sum of weight x mask x segment."""
    weights = np.zeros((len(WORDS), logits), np.float32)
    weights[WORDS.index("river"), -1] = 2.0
    weights[WORDS.index("delta"), 0] = 0.5 if logits == 1 else -0.5
    nodes = [helper.make_node("Gather", ["weights", "input_ids"], ["weighed0"])]
    for number, name in enumerate(each for each in inputs if each != "input_ids"):
        nodes += [
            helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", [f"{name}.float", "last"], [f"{name}.column"]),
            helper.make_node("Mul", [f"weighed{number}", f"{name}.column"], [f"weighed{number + 1}"]),
        ]
    nodes.append(helper.make_node("ReduceSum", [f"weighed{len(inputs) - 1}", "one"], ["logits"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, kind, ["pairs", "length"]) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["pairs", logits])],
        [_weight("weights", weights), _weight("last", np.array([-1])), _weight("one", np.array([1]))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder


def _weight(name: str, value: npt.NDArray[Any]) -> onnx.TensorProto:
    return numpy_helper.from_array(value, name)


@pytest.mark.parametrize("logits", [1, 2])
@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.INT64])
async def test_a_local_model_scores_each_passage(tmp_path: Path, kind: int, logits: int) -> None:
    tokenizer(cross_encoder(tmp_path, kind=kind, logits=logits))
    texts = ["bread oven", "river", "river river delta", "", "river " * 5]
    for path in (tmp_path, tmp_path / "model.onnx"):
        reranker: Reranker = OnnxCrossEncoder(path)
        assert list(await reranker.score("river", passages(*texts))) == [0.0, 2.0, 4.5, 0.0, 10.0]
        assert list(await reranker.score("river", [])) == []


async def test_a_cross_encoder_without_token_types(tmp_path: Path) -> None:
    folder = cross_encoder(tmp_path / "onnx", inputs=("input_ids", "attention_mask")).parent
    tokenizer(folder)
    assert list(await OnnxCrossEncoder(folder).score("river", passages("bread", "river"))) == [2.0, 4.0]


async def test_a_pair_is_truncated_to_512_tokens_the_longer_side_first(tmp_path: Path) -> None:
    tokenizer(cross_encoder(tmp_path))
    reranker = OnnxCrossEncoder(tmp_path)
    scores = await reranker.score("bread " * 9, passages("river " * 5000, "river"))
    # 512 tokens, less three marks and the nine of the question.
    assert list(scores) == [2.0 * 500, 2.0]
    assert (await reranker.score("bread " * 5000, passages("river")))[0] == 2.0


async def test_scores_of_many_passages_keep_their_order(tmp_path: Path) -> None:
    tokenizer(cross_encoder(tmp_path))
    counts = [number * 53 % 300 for number in range(120)]
    scores = await OnnxCrossEncoder(tmp_path, threads=2).score("bread", passages(*("river " * n for n in counts)))
    assert list(scores) == [2.0 * count for count in counts]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "model.onnx").unlink(), "needs model.onnx"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json beside"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"nonsense"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"{}"), "cannot be loaded"),
        (lambda folder: cross_encoder(folder, inputs=("input_ids", "pixels")), "not a cross-encoder"),
    ],
)
def test_files_that_are_not_a_cross_encoder_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], complaint: str
) -> None:
    tokenizer(cross_encoder(tmp_path))
    spoil(tmp_path)
    with pytest.raises(ConfigurationError, match=complaint):
        OnnxCrossEncoder(tmp_path)


async def test_a_cross_encoder_with_unexpected_outputs_fails(tmp_path: Path) -> None:
    tokenizer(cross_encoder(tmp_path, logits=3))
    with pytest.raises(RerankFailed, match="neither one nor two"):
        await OnnxCrossEncoder(tmp_path).score("river", passages("river", "bread"))


def by_length(asked: dict[str, Any]) -> object:
    """Longer passages are better; the best first, as servers answer."""
    texts = asked.get("documents", asked.get("texts"))
    assert isinstance(texts, list)
    ranked = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    if "texts" in asked:
        return [{"index": number, "score": float(len(texts[number]))} for number in ranked]
    found = [{"index": number, "relevance_score": float(len(texts[number]))} for number in ranked]
    return {"id": "1", "results": found[: asked["top_n"]], "meta": {}}


def endpoint(server: Served, form: Form, timeout_s: float = 5.0) -> RerankEndpoint:
    url = rerank_url(server.url, form)
    client = ModelServer(url, server.outbound, api_key="key", timeout_s=timeout_s, sleep=server.sleep)
    return RerankEndpoint(client, form, "rerank-1")


@pytest.mark.parametrize("form", FORMS)
async def test_a_rerank_server_scores_each_passage(form: Form) -> None:
    texts = ["x" * (number * 37 % 211) for number in range(150)]
    async with served(by_length) as server:
        reranker: Reranker = endpoint(server, form)
        assert list(await reranker.score("q", passages(*texts))) == [float(len(text)) for text in texts]
        assert list(await reranker.score("q", [])) == []
    assert {asked["query"] for asked in server.asked} == {"q"}
    assert server.headers[0]["Authorization"] == "Bearer key"
    if form == "cohere":
        assert [len(asked["documents"]) for asked in server.asked] == [100, 50]
        assert server.asked[0]["model"] == "rerank-1"
        assert server.paths[0] == "/v1/rerank"
    else:
        assert [len(asked["texts"]) for asked in server.asked] == [32, 32, 32, 32, 22]
        assert server.paths[0] == "/rerank"


@pytest.mark.parametrize("form", FORMS)
async def test_a_busy_rerank_server_is_retried_and_a_refusal_is_not(form: Form) -> None:
    async with served(ConnectionResetError(), 503, by_length) as server:
        assert list(await endpoint(server, form).score("q", passages("abc"))) == [3.0]
        assert len(server.slept) == 2
    async with served(401) as server:
        with pytest.raises(RerankFailed, match="No luck today") as failed:
            await endpoint(server, form).score("q", passages("abc"))
        assert server.slept == []
    assert failed.value.code == "rerank_failed"


async def test_a_rerank_server_that_times_out_fails() -> None:
    async with served(None) as server:
        with pytest.raises(RerankFailed, match=r"within 0\.05 s"):
            await endpoint(server, "tei", timeout_s=0.05).score("q", passages("abc"))


def results(*pairs: tuple[object, object]) -> Callable[[Form], object]:
    def made(form: Form) -> object:
        if form == "cohere":
            return {"results": [{"index": index, "relevance_score": score} for index, score in pairs]}
        return [{"index": index, "score": score} for index, score in pairs]

    return made


HOSTILE: list[tuple[str, bytes | Callable[[Form], object]]] = [
    ("not a list", b"<html>"),
    ("not a list", b"[" * 100_000),
    ("not a list", b"{}"),
    ("not a list", b'[{"index": 0, "score": NaN}, {"index": 1, "score": 1}]'),
    ("not a list", results((0, "0.9"), (1, "0.1"))),
    ("not a list", results((0, None), (1, 0.1))),
    ("not a list", results(("0", 0.9), ("1", 0.1))),
    ("not a list", results((True, 0.9), (False, 0.1))),
    ("does not match", results()),
    ("does not match", results((0, 0.9))),
    ("does not match", results((0, 0.9), (0, 0.8))),
    ("does not match", results((0, 0.9), (2, 0.8))),
    ("does not match", results((0, 0.9), (-1, 0.8))),
    ("does not match", results((0, 0.9), (1, 0.8), (2, 0.7))),
    ("larger than", b" " * 5_000_000),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("complaint", "reply"), HOSTILE)
async def test_hostile_replies_fail_clearly(
    form: Form, complaint: str, reply: bytes | Callable[[Form], object]
) -> None:
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply(form))
    async with served(body) as server:
        with pytest.raises(RerankFailed, match=complaint):
            await endpoint(server, form).score("q", passages("a", "b"))


@pytest.mark.parametrize(
    ("form", "given", "called"),
    [
        ("cohere", "http://h", "http://h/v1/rerank"),
        ("cohere", "http://h/v2/", "http://h/v2/rerank"),
        ("cohere", "http://h/api/rerank", "http://h/api/rerank"),
        ("tei", "http://h/", "http://h/rerank"),
        ("tei", "http://h/rerank", "http://h/rerank"),
    ],
)
def test_a_reranker_url_may_be_host_or_full_path(form: Form, given: str, called: str) -> None:
    assert rerank_url(given, form) == called
