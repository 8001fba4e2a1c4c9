"""Generate: streams the model's answer, within its own time-out."""

import asyncio
from contextlib import aclosing, nullcontext
from typing import NamedTuple

import msgspec

from anabranch.domain.contracts import Clock, Emit, Generator
from anabranch.domain.errors import GenerationFailed, GenerationTimedOut
from anabranch.domain.events import GenerationStarted, Token
from anabranch.domain.model import Context, Prompt, Usage


class Generated(NamedTuple):
    text: str
    usage: Usage | None
    finish_reason: str | None
    time_ms: int


async def generate(
    generator: Generator, model: str, prompt: Prompt, context: Context, emit: Emit, clock: Clock, timeout_s: float
) -> Generated:
    await emit(GenerationStarted(model=model))
    began = clock.monotonic()
    text: list[str] = []
    usage: Usage | None = None
    finish_reason: str | None = None
    own = timeout_s < context.deadline - began
    limit = asyncio.timeout(timeout_s) if own else nullcontext()
    if own:
        context = msgspec.structs.replace(context, deadline=began + timeout_s)
    try:
        # Not the Run's own deadline: that one ends the question, with its own error.
        async with limit, aclosing(generator.generate(prompt, context)) as deltas:
            async for delta in deltas:
                usage = delta.usage or usage
                finish_reason = delta.finish_reason or finish_reason
                if delta.text:
                    text.append(delta.text)
                    await emit(Token(text=delta.text))
            if not text:
                ended = f" (it ended with {finish_reason})" if finish_reason not in (None, "stop") else ""
                raise GenerationFailed(f"The model's reply holds no answer{ended}.")
    except TimeoutError:
        raise GenerationTimedOut(
            f"Model generation failed: the model did not finish within {timeout_s:.3g} seconds.",
            model_path=model,
            latency_ms=_since(began, clock),
        ) from None
    except GenerationFailed as error:
        details = {**error.details, "model_path": model, "latency_ms": _since(began, clock)}
        raise type(error)(f"Model generation failed: {error.message}", **details) from error
    return Generated("".join(text), usage, finish_reason, _since(began, clock))


def _since(began: float, clock: Clock) -> int:
    return round((clock.monotonic() - began) * 1000)
