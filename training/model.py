"""The evidence model: MiniLM's encoder, which reads a question and passages together, and its heads."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from training.weights import PASSAGE, TOKENS

HEADS = 12
DIMENSIONS = 384
WIDE = 1536
EPSILON = 1e-12
DROPOUT = 0.1
# Of new weights.
SPREAD = 0.02

# As in anabranch.models.minilm_graph, which computes in 8 bits what quantization-aware training imitates.
SMOOTHING = 0.8
PAIR_LIMIT = 127.5
DIP = 0.17

# The names of a layer's weights in MiniLM's own files, and here.
LAYER = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "dense",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "wide",
    "output.dense": "narrow",
    "output.LayerNorm": "output_norm",
}
EMBEDDINGS = {
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "types",
    "embeddings.LayerNorm.weight": "norm.weight",
    "embeddings.LayerNorm.bias": "norm.bias",
}

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Output(NamedTuple):
    """`passage` [inputs, 5] and `tokens` [inputs, tokens, 3]: training.weights has their names."""

    passage: Tensor
    tokens: Tensor
    hidden: Tensor


class Product(nn.Linear):
    """A matrix product that can imitate the 8 bits of the product's graph: each row of activations and each output has
    its own scale. Gradients pass through the rounding."""

    def __init__(self, inputs: int, outputs: int, *, after_gelu: bool = False) -> None:
        super().__init__(inputs, outputs)
        self.quantized = False
        self._after_gelu = after_gelu
        self.register_buffer("smooth", torch.ones(inputs), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.quantized:
            return F.linear(x, self.weight, self.bias)
        return F.linear(self._rows(x.float()), self._columns(), self.bias)

    def _rows(self, x: Tensor) -> Tensor:
        if self._after_gelu:
            raised = x + DIP
            return _rounded(raised, raised.amax(-1, keepdim=True) / 255) - DIP
        x = x / self.smooth
        return _rounded(x, x.abs().amax(-1, keepdim=True) / 127)

    def _columns(self) -> Tensor:
        weight = self.weight.float() * self.smooth
        pairs = weight.view(len(weight), -1, 2)
        together = pairs.sum(2).abs() * (pairs.prod(2) > 0)
        scales = torch.maximum(weight.abs().amax(1) / 127, together.amax(1) / PAIR_LIMIT)
        return _rounded(weight, scales[:, None])


def _rounded(value: Tensor, scale: Tensor) -> Tensor:
    scale = scale.clamp(min=1e-9).detach()
    return value + ((value / scale).round() * scale - value).detach()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (Product(DIMENSIONS, DIMENSIONS) for _ in range(4))
        self.wide, self.narrow = Product(DIMENSIONS, WIDE), Product(WIDE, DIMENSIONS, after_gelu=True)
        self.attention_norm, self.output_norm = (nn.LayerNorm(DIMENSIONS, EPSILON) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        dropout = DROPOUT if self.training else 0.0
        query, key, value = (
            each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        seen = self.dense(seen.transpose(1, 2).flatten(-2))
        x = self.attention_norm(x + F.dropout(seen, dropout, self.training))
        return self.output_norm(x + F.dropout(self.narrow(F.gelu(self.wide(x))), dropout, self.training))


class EvidenceModel(nn.Module):
    def __init__(self, words: Tensor, layers: int) -> None:
        """`words` is the embedder's word table: fixed, and not part of the weights."""
        super().__init__()
        self.register_buffer("words", words, persistent=False)
        self.positions = nn.Parameter(torch.zeros(512, DIMENSIONS))
        self.types = nn.Parameter(torch.zeros(2, DIMENSIONS))
        self.norm = nn.LayerNorm(DIMENSIONS, EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.pool = nn.Linear(DIMENSIONS, DIMENSIONS)
        self.passage = nn.Linear(DIMENSIONS, len(PASSAGE))
        self.tokens = nn.Linear(DIMENSIONS, len(TOKENS))
        for head in (self.pool, self.passage, self.tokens):
            nn.init.normal_(head.weight, std=SPREAD)
            nn.init.zeros_(head.bias)

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> Output:
        # Arithmetic instead of indexing: the gradient of an index into two rows takes half of the time of a step.
        segments = types[..., None] * (self.types[1] - self.types[0]) + self.types[0]
        x = self.norm(F.embedding(ids, self.words) + self.positions[: ids.shape[1]] + segments)
        x = F.dropout(x, DROPOUT, self.training)
        seen = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, seen)
        pooled = F.dropout(torch.tanh(self.pool(x[:, 0])), DROPOUT, self.training)
        return Output(self.passage(pooled).float(), self.tokens(x).float(), x)

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        """The trained weights, by the names of MiniLM's own files."""
        return {_name(name): value.detach().float().cpu().numpy() for name, value in self.named_parameters()}

    def smoothed_products(self) -> dict[str, list[Product]]:
        """The products whose operand is a norm's output, by the norm's name in the product's graph."""
        products: dict[str, list[Product]] = {}
        before = "embedded"
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            products[before] = [layer.query, layer.key, layer.value]
            products[f"layer{number}.attention"] = [layer.wide]
            before = f"layer{number}.output"
        return products


def new_model(base: Arrays, layers: tuple[int, ...]) -> EvidenceModel:
    """From these layers of MiniLM; the heads are new."""
    model = EvidenceModel(word_table(base), len(layers))
    chosen = {f"encoder.layer.{old}.": f"encoder.layer.{new}." for new, old in enumerate(layers)}
    renamed = {name: name for name in base}
    for name in base:
        prefix = next((old for old in chosen if name.startswith(old)), None)
        if name.startswith("encoder.layer."):
            renamed[name] = chosen[prefix] + name.removeprefix(prefix) if prefix else ""
    _load(model, {renamed[name]: base[name] for name in base if renamed[name]}, strict=False)
    return model


def trained_model(base: Arrays, weights: Arrays) -> EvidenceModel:
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    model = EvidenceModel(word_table(base), layers)
    _load(model, weights, strict=True)
    return model


def word_table(base: Arrays) -> Tensor:
    words, scales = base["words"], base["scales"]
    return torch.from_numpy(words.astype(np.float32) * scales.astype(np.float32))


def calibrate(model: EvidenceModel, reach: Mapping[str, Tensor]) -> None:
    """From here on the model computes as in 8 bits. `reach` says how far from zero each channel of a norm goes."""
    for name, products in model.smoothed_products().items():
        channels = reach[name].clamp(min=1e-3)
        for product in products:
            product.smooth.copy_((channels / channels.log().mean().exp()) ** SMOOTHING)
    for module in model.modules():
        if isinstance(module, Product):
            module.quantized = True


def _load(model: EvidenceModel, arrays: Arrays, *, strict: bool) -> None:
    names = {_name(name): name for name, _ in model.named_parameters()}
    state = {names[name]: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays if name in names}
    missing, _ = model.load_state_dict(state, strict=False)
    heads = ("pool.", "passage.", "tokens.")
    lost = [name for name in missing if strict or not name.startswith(heads)]
    if lost:
        raise ValueError(f"The weights have no {', '.join(lost)}.")


def _name(name: str) -> str:
    """The name of a parameter in MiniLM's own files."""
    for theirs, ours in EMBEDDINGS.items():
        if name == ours:
            return theirs
    if name.startswith("layers."):
        _, number, part, kind = name.split(".")
        theirs = next(theirs for theirs, ours in LAYER.items() if ours == part)
        return f"encoder.layer.{number}.{theirs}.{kind}"
    return name
