"""Trains the evidence model and writes its weights, also as it goes along."""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from training import sources, weights
from training.batches import Chunk, Epochs, Shape
from training.corpus import Corpus
from training.examples import Examples
from training.inputs import plain_tokenizer
from training.losses import LABELS_SHARE, Labelled, labelled, losses, taught, total
from training.mine import mined
from training.model import EvidenceModel, calibrate, new_model, trained_model

BETAS, SMALL, DECAY = (0.9, 0.98), 1e-6, 0.01
# Learning rates: the heads are new; each layer has less than the one above it.
HEADS_RATE, LOWER_RATE = 4.0, 0.9
WARM_UP, LEAST_RATE = 0.05, 0.02
LONGEST_GRADIENT = 1.0
# The weights that are kept are a moving average, updated every few steps.
AVERAGE, AVERAGE_EVERY = 0.999, 5
CHECKPOINT_S = 60
REPORT_EVERY = 250
# Seconds that are left for imports and for writing the weights.
RESERVE_S = 10
# With --steps the clock decides only if the run is late by more than this share of it.
LATE = 0.03
QUANTIZED_SHARE, CALIBRATION_BATCHES = 0.2, 40
FIRST_REPORTS = (5, 20, 50)
CHUNKS_AHEAD = 2
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Clock:
    """How much of the training is done: 1 at the last step, or when the time is over, whichever comes first. `fixed`:
    the number of steps was given, so that a second run does the same, and the clock decides only if the run is late."""

    steps: int
    began: float
    until: float
    fixed: bool
    # Done by an earlier part of this training.
    earlier: float = 0.0

    def done(self, step: int) -> float:
        by_steps = step / self.steps
        passed = (time.monotonic() - self.began) / max(1e-3, self.until - self.began)
        by_time = self.earlier + (1 - self.earlier) * passed
        late = by_time - by_steps > (LATE if self.fixed else 0)
        return by_time if late or by_time >= 1 else by_steps


class Training:
    def __init__(self, model: EvidenceModel, arguments: argparse.Namespace, device: str) -> None:
        self.model, self.device = model, device
        self.arguments = arguments
        self._optimizer = torch.optim.AdamW(
            _groups(model, arguments.lr), betas=BETAS, eps=SMALL, weight_decay=DECAY, fused=device == "cuda"
        )
        self._peaks = [group["lr"] for group in self._optimizer.param_groups]
        self.average = [value.detach().clone() for value in model.parameters()]
        self.teacher: EvidenceModel | None = None
        self.step = self.chunk = 0
        self.reach: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self.run = torch.compile(model, dynamic=True) if arguments.compile else model

    def one(self, batch: Labelled, done: float) -> None:
        rate = min(1.0, (done + 1e-4) / WARM_UP) * max(LEAST_RATE, 1 - done)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * rate
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            output = self.run(batch.ids, batch.types, batch.mask)
        found = losses(output, batch)
        loss = total(found)
        if self.teacher is not None:
            with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                said = self.teacher(batch.ids, batch.types, batch.mask)
            found["taught"] = taught(output, said, batch, hidden=self.arguments.teacher_base is None)
            loss = LABELS_SHARE * loss + found["taught"]
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        self._optimizer.step()
        self.step += 1
        if self.step % AVERAGE_EVERY == 0:
            kept = min(AVERAGE, (1 + self.step) / (10 + self.step)) ** AVERAGE_EVERY
            torch._foreach_lerp_(self.average, [value.detach() for value in self.model.parameters()], 1 - kept)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def means(self, steps: int) -> dict[str, float]:
        """The losses since the last call."""
        found = {name: float(value) / steps for name, value in self._sums.items()}
        self._sums = {}
        return found

    def write(self, folder: Path) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        averaged = dict(zip(names, self.average, strict=True))
        held = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(averaged[name])
            arrays: dict[str, Any] = self.model.arrays()
            for name, value in self.model.named_parameters():
                value.copy_(held[name])
        arrays |= {f"reach.{name}": value.cpu().numpy() for name, value in self.reach.items()}
        weights.write(folder, arrays)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "average": self.average,
            "step": self.step,
            "chunk": self.chunk,
            "reach": self.reach,
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.average = state["average"]
        self.step, self.chunk = state["step"], state["chunk"]
        if state["reach"]:
            self.reach = state["reach"]
            calibrate(self.model, self.reach)

    def quantize(self, batches: list[Labelled]) -> None:
        """Measure the norms on some batches, then compute as in 8 bits."""
        for name, products in self.model.smoothed_products().items():
            self.reach[name] = torch.zeros(products[0].in_features, device=self.device)
            products[0].register_forward_pre_hook(_watch(self.reach[name]))
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                self.model(batch.ids, batch.types, batch.mask)
        self.model.train()
        for products in self.model.smoothed_products().values():
            products[0]._forward_pre_hooks.clear()
        calibrate(self.model, self.reach)


def _watch(reach: Tensor) -> Any:
    def seen(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        reach.copy_(torch.maximum(reach, inputs[0].detach().float().abs().flatten(0, -2).amax(0)))

    return seen


def _groups(model: EvidenceModel, rate: float) -> list[dict[str, Any]]:
    count = len(model.layers)
    heads = [*model.pool.parameters(), *model.passage.parameters(), *model.tokens.parameters()]
    lowest = [model.positions, model.types, *model.norm.parameters()]
    groups = [{"params": heads, "lr": rate * HEADS_RATE}, {"params": lowest, "lr": rate * LOWER_RATE**count}]
    for number, layer in enumerate(model.layers):
        groups.append({"params": list(layer.parameters()), "lr": rate * LOWER_RATE ** (count - 1 - number)})
    return groups


def batches(epochs: Epochs, training: Training, workers: int) -> Iterator[Labelled]:
    """Batches on the device, in the order that the seed gives, from worker processes."""
    loader = DataLoader(
        epochs,
        batch_size=None,
        sampler=range(training.chunk, sys.maxsize),
        num_workers=workers,
        prefetch_factor=CHUNKS_AHEAD if workers else None,
        pin_memory=training.device == "cuda",
        collate_fn=_tensors,
        worker_init_fn=_quiet,
    )
    for numbers, shapes in loader:
        training.chunk += 1
        moved = numbers.to(training.device, non_blocking=True)
        sizes = [inputs * Shape(inputs, units, tokens).width() for inputs, units, tokens in shapes]
        for part, shape in zip(moved.split(sizes), shapes, strict=True):
            yield labelled(part, Shape(*shape))


def _tensors(chunk: Chunk) -> tuple[Tensor, list[tuple[int, ...]]]:
    return torch.from_numpy(chunk.numbers), [tuple(shape) for shape in chunk.shapes]


def _quiet(_: int) -> None:
    """A worker is one of many: it needs no threads of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def fit(training: Training, epochs: Epochs, clock: Clock, arguments: argparse.Namespace) -> dict[str, float]:
    """Train until the clock says so, or until the pause; returns the last losses."""
    source = batches(epochs, training, arguments.workers)
    training.model.train()
    found: dict[str, float] = {}
    report_time = checkpoint_time = time.monotonic()
    report_step, tokens, waited = training.step, 0, 0.0
    while (done := clock.done(training.step)) < 1 and time.monotonic() < arguments.pause_at:
        asked = time.monotonic()
        batch = next(source)
        waited += time.monotonic() - asked
        tokens += batch.ids.numel()
        if arguments.quantize_aware and not training.reach and done > 1 - QUANTIZED_SHARE:
            training.quantize([next(source) for _ in range(CALIBRATION_BATCHES)])
        training.one(batch, done)
        if (training.step - report_step) == REPORT_EVERY or training.step in FIRST_REPORTS:
            found = training.means(training.step - report_step)
            seconds = time.monotonic() - report_time
            speed = f"{(training.step - report_step) / seconds:.1f} steps/s, {tokens / seconds / 1e6:.2f}M tokens/s"
            said = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            epoch = training.chunk / epochs.chunks
            say(
                f"{training.step}/{clock.steps} ({done:.0%}, epoch {epoch:.1f}), {speed}, waited {waited:.1f} s: {said}"
            )
            report_time, report_step, tokens, waited = time.monotonic(), training.step, 0, 0.0
        if time.monotonic() - checkpoint_time > CHECKPOINT_S:
            training.write(arguments.out)
            checkpoint_time = time.monotonic()
    return found or training.means(max(1, training.step - report_step))


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def prepared(arguments: argparse.Namespace, device: str) -> tuple[Training, Epochs, Corpus]:
    with np.load(arguments.base) as held:
        base = {name: held[name] for name in held.files}
    corpus = Corpus(arguments.data, plain_tokenizer(bytes(base["tokenizer"])), arguments.sample)
    say(
        f"{len(corpus.passages):,} passages, {len(corpus.questions):,} questions, {len(corpus.claims):,} claims; "
        f"{corpus.misplaced_answers} answers are not where the data says"
    )
    hard = mined(arguments.mine, corpus) if arguments.mine else None
    made_claims = sources.MADE_CLAIMS if arguments.sample is None else arguments.sample
    epochs = Epochs(
        corpus,
        Examples(corpus, hard, unjudged=arguments.teacher is not None),
        seed=arguments.seed,
        tokens=arguments.tokens,
        made_claims=made_claims,
        only_claims=arguments.only_claims,
    )
    torch.manual_seed(arguments.seed)
    started = trained_model(base, weights.read(arguments.start)) if arguments.start else None
    training = Training((started or new_model(base, arguments.layers)).to(device), arguments, device)
    if arguments.teacher:
        if arguments.teacher_base:
            with np.load(arguments.teacher_base) as held:
                base = {name: held[name] for name in ("words", "scales")}
        training.teacher = trained_model(base, weights.read(arguments.teacher)).to(device).eval()
    if arguments.state and arguments.state.exists():
        training.resume(torch.load(arguments.state, map_location=device, weights_only=True))
        say(f"resumed at step {training.step}")
    return training, epochs, corpus


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=True, help="files of training data")
    add("--base", type=Path, required=True, help="what training.base wrote")
    add("--out", type=Path, required=True, help="folder for the weights")
    add("--seed", type=int, default=1)
    add("--minutes", type=float, default=8.0, help="for the whole command; the learning rate ends with it")
    add("--epochs", type=float, default=8.0)
    add("--steps", type=int, help="instead of epochs: then two runs do the same")
    add("--lr", type=float, default=1.5e-4, help="learning rate of the highest layer")
    add("--tokens", type=int, default=32768, help="of a batch")
    add("--layers", type=_layers, default=(0, 1, 2, 3, 4, 5), help="layers of MiniLM to start from, such as 0,2,4")
    add("--only-claims", action="store_true", help="train the model of claims: questions only make claims")
    add("--start", type=Path, help="start from these weights instead of MiniLM's")
    add("--teacher", type=Path, help="weights of a model to imitate")
    add("--teacher-base", type=Path, help="the teacher's words, if they are not those of --base")
    add("--mine", type=Path, help="what training.mine wrote: near passages that are hard to tell apart")
    add("--quantize-aware", action="store_true", help="imitate 8 bits in the last fifth")
    add("--compile", action="store_true", help="torch.compile: slow to start, then faster")
    add("--workers", type=int, default=max(0, (os.cpu_count() or 2) - 2))
    add("--state", type=Path, help="resume from this file if it exists; written at the end of a part")
    add("--pause", type=float, metavar="MINUTES", help="stop then, for a later command with the same --state")
    add("--sample", type=int, help="take only so many questions and claims of each file, for a quick try")
    return parser.parse_args(words)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # cuDNN's attention is compiled anew for every shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    arguments.pause_at = BEGAN + arguments.pause * 60 if arguments.pause is not None else float("inf")
    training, epochs, corpus = prepared(arguments, device)
    steps = arguments.steps or max(8, round(arguments.epochs * epochs.chunks * len(epochs[0].shapes)))
    began = time.monotonic()
    clock = Clock(
        steps, began, BEGAN + arguments.minutes * 60 - RESERVE_S, bool(arguments.steps), training.step / steps
    )
    say(f"{steps} steps on {device}, {arguments.workers} workers, {epochs.chunks} chunks an epoch")
    found = fit(training, epochs, clock, arguments)
    training.write(arguments.out)
    if arguments.state:
        torch.save(training.state(), arguments.state)
    seconds = time.monotonic() - began
    record = {
        "command": ["python", "-m", "training.train", *(sys.argv[1:] if words is None else words)],
        "data_sha256": corpus.sha256,
        "base_sha256": hashlib.sha256(arguments.base.read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "steps": training.step,
        "planned_steps": steps,
        "epochs": round(training.chunk / epochs.chunks, 2),
        "seconds": round(seconds, 1),
        "losses": {name: round(value, 4) for name, value in found.items()},
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    say(f"{training.step} steps in {seconds:.0f} s; weights are in {arguments.out}")


if __name__ == "__main__":
    main()
