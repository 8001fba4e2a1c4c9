"""What training minimizes."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from training.batches import CLAIM_START, FIELDS, WEIGHT_UNIT, Shape
from training.examples import NO_CLAIM, UNKNOWN
from training.model import Output

WEIGHTS = {"relevance": 1.0, "answerable": 1.0, "units": 2.0, "choice": 1.0, "claim": 1.0, "span": 1.0, "words": 2.0}
# Evidence is rare among units.
EVIDENCE_WEIGHT = 2.0
# Of a claim of which it is only known that it is not supported.
NOT_SUPPORTED_WEIGHT = 0.5
# The share of a claim's label that is spread over all labels: without it the model is far too sure when it is wrong.
SMOOTHED = 0.04
# Wrong words are rare in claims.
WRONG_WEIGHT = 2.0
OUTSIDE = -1e4
# Of a claim's words, this output of a token says whether they are wrong; of a question there is nothing to say.
WORD = 0

# With a teacher: the share of the labels, and the weights of what the teacher says.
LABELS_SHARE = 0.4
TAUGHT = {"passage": 2.0, "claim": 2.0, "span": 0.5, "units": 1.0, "words": 2.0, "hidden": 0.5}


class Labelled(NamedTuple):
    """A batch on the device."""

    ids: Tensor
    types: Tensor
    mask: Tensor
    markers: Tensor
    units: Tensor
    words: Tensor
    fields: dict[str, Tensor]


def labelled(numbers: Tensor, shape: Shape) -> Labelled:
    """Takes a batch out of its part of a chunk, already on the device."""
    rows = numbers.view(shape.inputs, shape.width()).long()
    sizes = [len(FIELDS), shape.units, shape.units, shape.tokens, shape.tokens]
    head, markers, units, words, ids = rows.split(sizes, dim=1)
    fields = dict(zip(FIELDS, head.unbind(1), strict=True))
    at = torch.arange(shape.tokens, device=numbers.device)
    mask = at < fields["length"][:, None]
    types = mask & (at >= fields["pages_start"][:, None])
    return Labelled(ids, types.float(), mask, markers, units, words, fields)


def losses(output: Output, batch: Labelled) -> dict[str, Tensor]:
    """Each is a sum over the inputs that have the label, divided by all inputs."""
    fields, count = batch.fields, len(batch.ids)
    found = {}
    for column, name in enumerate(("relevance", "answerable")):
        known = (fields[name] >= 0).float()
        right = fields[name].clamp(min=0).float()
        each = F.binary_cross_entropy_with_logits(output.passage[:, column], right, reduction="none")
        found[name] = (each * known).sum() / count
    found["units"] = _units(output, batch)
    found["choice"] = _choice(output, batch) / count
    found["claim"] = _claims(output.passage[:, 2:], fields["claim"]) / count
    found["words"] = _words(output, batch)
    scores = _spans(output, batch)
    found["span"] = sum(
        F.cross_entropy(scores[..., column], fields[name], ignore_index=-1, reduction="sum") / 2
        for column, name in enumerate(("span_start", "span_end"))
    ) / torch.tensor(count)
    return found


def total(found: dict[str, Tensor]) -> Tensor:
    return torch.stack([WEIGHTS[name] * loss for name, loss in found.items()]).sum()


def _units(output: Output, batch: Labelled) -> Tensor:
    """The mean over units, times the share of inputs that have labels for them."""
    known = batch.units >= 0
    weight = known.float() * batch.fields["unit_weight"][:, None] / WEIGHT_UNIT
    each = F.binary_cross_entropy_with_logits(
        _at_markers(output, batch),
        batch.units.clamp(min=0).float(),
        reduction="none",
        pos_weight=torch.tensor(EVIDENCE_WEIGHT, device=weight.device),
    )
    return (each * weight).sum() / weight.sum().clamp(min=1) * known.any(1).float().mean()


def _choice(output: Output, batch: Labelled) -> Tensor:
    """Evidence against the other units of the same input: which is best matters more than how likely each is."""
    scores = _at_markers(output, batch).float()
    every = scores.masked_fill(batch.units < 0, OUTSIDE).logsumexp(1)
    evidence = scores.masked_fill(batch.units < 1, OUTSIDE).logsumexp(1)
    return ((every - evidence) * (batch.units > 0).any(1)).sum()


def _claims(logits: Tensor, label: Tensor) -> Tensor:
    likely = logits.log_softmax(1)
    right = likely.gather(1, label.clamp(min=0)[:, None])[:, 0]
    known = -((1 - SMOOTHED) * right + SMOOTHED * likely.mean(1)) * (label >= 0)
    not_supported = -likely[:, 1:].logsumexp(1) * (label == UNKNOWN)
    return (known + NOT_SUPPORTED_WEIGHT * not_supported).sum()


def _words(output: Output, batch: Labelled) -> Tensor:
    """Which words of a claim are wrong: the mean over its words, times the share of inputs with labels for them."""
    known = (batch.words >= 0).float()
    each = F.binary_cross_entropy_with_logits(
        output.tokens[..., WORD],
        batch.words.clamp(min=0).float(),
        reduction="none",
        pos_weight=torch.tensor(WRONG_WEIGHT, device=known.device),
    )
    return (each * known).sum() / known.sum().clamp(min=1) * known.any(1).float().mean()


def _at_markers(output: Output, batch: Labelled) -> Tensor:
    return output.tokens[..., 2].gather(1, batch.markers)


def _spans(output: Output, batch: Labelled) -> Tensor:
    """Scores of starts and ends. An answer is in the pages; the first token stands for "no answer"."""
    allowed = batch.types > 0
    allowed = torch.cat([torch.ones_like(allowed[:, :1]), allowed[:, 1:]], dim=1)
    return output.tokens[..., :2].masked_fill(~allowed[..., None], OUTSIDE)


def taught(output: Output, teacher: Output, batch: Labelled, *, hidden: bool) -> Tensor:
    """How far the model is from its teacher; `hidden`: also in what they compute of each token, which only models of
    the same words have in common."""
    question = (batch.fields["claim"] == NO_CLAIM).float()
    found = {}
    each = F.binary_cross_entropy_with_logits(output.passage[:, :2], teacher.passage[:, :2].sigmoid(), reduction="none")
    found["passage"] = (each.mean(1) * question).mean()
    apart = F.kl_div(output.passage[:, 2:].log_softmax(1), teacher.passage[:, 2:].softmax(1), reduction="none")
    found["claim"] = (apart.sum(1) * (1 - question)).mean()
    apart = F.kl_div(_spans(output, batch).log_softmax(1), _spans(teacher, batch).softmax(1), reduction="none")
    found["span"] = (apart.sum((1, 2)) * question).mean()
    marked = (batch.markers > 0).float()
    each = F.binary_cross_entropy_with_logits(
        _at_markers(output, batch), _at_markers(teacher, batch).sigmoid(), reduction="none"
    )
    found["units"] = (each * marked).sum() / marked.sum().clamp(min=1)
    at = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    of_claim = ((at >= CLAIM_START) & (at < batch.fields["pages_start"][:, None] - 1)).float() * (1 - question)[:, None]
    each = F.binary_cross_entropy_with_logits(
        output.tokens[..., WORD], teacher.tokens[..., WORD].sigmoid(), reduction="none"
    )
    found["words"] = (each * of_claim).sum() / of_claim.sum().clamp(min=1) * (1 - question).mean()
    if hidden:
        real = batch.mask.float()
        squares = (output.hidden.float() - teacher.hidden.float()).square().mean(-1)
        found["hidden"] = (squares * real).sum() / real.sum()
    return torch.stack([TAUGHT[name] * loss for name, loss in found.items()]).sum()
