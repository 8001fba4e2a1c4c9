"""A tiny NLI model, in an ONNX folder and behind a server: a claim whose words are in the text follows from it, and it
contradicts the text if only one of them has the word "not"."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

THREE = ("entailment", "neutral", "contradiction")
TWO = ("entailment", "not_entailment")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
TEXT = (
    "not a an and are bread by carries cod delta dried everest fish for founded high in is it keeps metres mountain "
    "mount needed of oldest one river salt sand sea sweden the to university uppsala was wet years"
)
WORDS = TEXT.split()
WORD = re.compile(r"\w+|\[\w+\]")


def nli_folder(
    folder: Path, labels: Sequence[str] = THREE, *, outputs: Sequence[str] | None = None, **config: object
) -> Path:
    """`outputs` are what the model really gives, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(folder / "tokenizer.json")
    onnx.save(_model(outputs or labels), folder / "model.onnx")
    named = {str(number): label for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "id2label": named, **config}))
    return folder


def _tokenizer(file: Path) -> None:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    made.add_special_tokens(list(SPECIAL))
    made.normalizer = Lowercase()
    made.pre_tokenizer = Split(Regex(r"\w+"), "removed", invert=True)
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.save(str(file))


def _model(outputs: Sequence[str]) -> onnx.ModelProto:
    node = helper.make_node
    nodes = [
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
        node("Mul", ["mask", "types"], ["claim"]),
        node("Sub", ["mask", "claim"], ["text"]),
        # Which tokens of the claim are in the text.
        node("Unsqueeze", ["input_ids", "two"], ["rows"]),
        node("Unsqueeze", ["input_ids", "one"], ["columns"]),
        node("Equal", ["rows", "columns"], ["equal"]),
        node("Cast", ["equal"], ["same"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["text", "one"], ["text_columns"]),
        node("Mul", ["same", "text_columns"], ["in_text"]),
        node("ReduceMax", ["in_text"], ["found"], axes=[2], keepdims=0),
        node("Mul", ["found", "claim"], ["found_claim"]),
        node("ReduceSum", ["found_claim", "one"], ["count"], keepdims=1),
        node("ReduceSum", ["claim", "one"], ["length"], keepdims=1),
        node("Div", ["count", "length"], ["share"]),
        # Whether "not" is in one of them only.
        node("Equal", ["input_ids", "not_id"], ["is_not"]),
        node("Cast", ["is_not"], ["nots"], to=TensorProto.FLOAT),
        node("Sub", ["text", "claim"], ["sides"]),
        node("Mul", ["nots", "sides"], ["signed"]),
        node("ReduceSum", ["signed", "one"], ["difference"], keepdims=1),
        node("Abs", ["difference"], ["differs"]),
        # The logits.
        node("Mul", ["share", "eight"], ["agrees"]),
        node("Mul", ["differs", "eight"], ["against"]),
        node("Sub", ["agrees", "six"], ["near"]),
        node("Sub", ["near", "against"], ["entailment"]),
        node("Mul", ["against", "share"], ["opposed"]),
        node("Sub", ["opposed", "six"], ["contradiction"]),
        node("Mul", ["share", "zero"], ["neutral"]),
        node("Identity", ["neutral"], ["not_entailment"]),
        node("Concat", list(outputs), ["logits"], axis=1),
    ]
    integers = {"one": [1], "two": [2], "not_id": [len(SPECIAL) + WORDS.index("not")]}
    floats = {"eight": 8.0, "six": 6.0, "zero": 0.0}
    held = [numpy_helper.from_array(np.array(value), name) for name, value in integers.items()]
    held += [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in floats.items()]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["pairs", "length"])
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["pairs", len(outputs)])],
        held,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def predicting(labels: Sequence[str] = THREE) -> Callable[[dict[str, Any]], object]:
    """What a server with such a model replies: the best label first."""

    def reply(asked: dict[str, Any]) -> object:
        return [_predicted(premise, hypothesis, labels) for premise, hypothesis in asked["inputs"]]

    return reply


def _predicted(premise: str, hypothesis: str, labels: Sequence[str]) -> list[dict[str, object]]:
    text, claim = (WORD.findall(one.lower()) for one in (premise, hypothesis))
    share = sum(word in text for word in claim) / max(1, len(claim))
    differs = abs(text.count("not") - claim.count("not"))
    logits = {
        "entailment": 8 * share - 6 - 8 * differs,
        "contradiction": 8 * differs * share - 6,
        "neutral": 0.0,
        "not_entailment": 0.0,
    }
    odds = {label: math.exp(logits[label]) for label in labels}
    found = [{"label": label, "score": one / sum(odds.values())} for label, one in odds.items()]
    return sorted(found, key=lambda one: -float(str(one["score"])))
