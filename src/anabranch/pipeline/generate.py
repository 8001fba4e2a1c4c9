"""Generate: what the model writes, within its time, and why it failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from anabranch.domain.contracts import Clock, Emit, Generator
from anabranch.domain.errors import EmptyReply, GenerationFailed, GenerationTimedOut
from anabranch.domain.events import FellBack, GenerationStarted, Token
from anabranch.domain.model import Citation, Context, Delta, Fallback, Prompt, Usage
from anabranch.pipeline.cite import cited
from anabranch.pipeline.prompt_injection import checked_answer, checked_deltas
from anabranch.pipeline.stop import STOPPED, stopped

if TYPE_CHECKING:
    from anabranch.pipeline.verify import Verifying
    from anabranch.text.safe_markdown import SafeMarkdown


class Generated(NamedTuple):
    """What `model` has written, and why it was that one, if another one should have."""

    text: str
    usage: Usage | None
    finish_reason: str | None
    time_ms: int
    model: str
    fallback: Fallback | None = None
    citations: tuple[Citation, ...] = ()
    support: float | None = None
    abstained: bool = False
    removed_links: tuple[str, ...] = ()


FAILED = "Model generation failed: "


async def generate(
    generator: Generator,
    model: str,
    prompt: Prompt,
    context: Context,
    emit: Emit,
    clock: Clock,
    timeout_s: float,
    fallback: Fallback | None = None,
    verifying: "Verifying | None" = None,
) -> Generated:
    """What the model writes; with `fallback` it replaces one that has failed. `verifying` learns what is quoted."""
    await emit(GenerationStarted(model=model) if fallback is None else FellBack(model=model, fallback=fallback))
    began = clock.monotonic()
    text: list[str] = []
    blank: list[str] = []
    usage: Usage | None = None
    finish_reason: str | None = None
    support: float | None = None
    abstained = False
    citations: list[Citation] = []
    checked = checked_answer(prompt) if prompt.defence else None
    limit = nullcontext() if context.deadline - began <= timeout_s else asyncio.timeout(timeout_s)
    context = context.until(began + timeout_s)
    try:
        # Not the Run's own deadline: that one ends the question, with its own error.
        async with limit, aclosing(generator.generate(prompt, context)) as deltas:
            async for delta in _shown(deltas, prompt, checked):
                usage = delta.usage or usage
                finish_reason = delta.finish_reason or finish_reason
                support = round(delta.support, 4) if delta.support is not None else support
                abstained = abstained or delta.abstained
                if delta.quotes:
                    citations += cited(delta, sum(map(len, text)), prompt.passages)
                if verifying is not None:
                    verifying.learn(delta)
                blank.append(delta.text)
                # White space before the first word is no answer yet.
                if delta.text if text else delta.text.strip():
                    text.append("".join(blank))
                    blank.clear()
                    await emit(Token(text=text[-1]))
            if not text and not (prompt.stop and finish_reason == STOPPED):
                raise _empty(finish_reason)
    except TimeoutError:
        late = f"the model did not finish within {timeout_s:.3g} seconds (AGGREGATOR_GENERATION_TIMEOUT)."
        raise _reported(GenerationTimedOut(late), model, _since(began, clock), started=bool(text)) from None
    except GenerationFailed as error:
        raise _reported(error, model, _since(began, clock), started=bool(text)) from error
    return Generated(
        text="".join(text),
        usage=usage,
        finish_reason=finish_reason,
        time_ms=_since(began, clock),
        model=model,
        fallback=fallback,
        citations=tuple(citations),
        support=support,
        abstained=abstained,
        removed_links=checked.removed if checked is not None else (),
    )


def _shown(deltas: AsyncIterator[Delta], prompt: Prompt, checked: "SafeMarkdown | None") -> AsyncIterator[Delta]:
    """What a model writes as the answer shows it."""
    if prompt.stop:
        deltas = stopped(deltas, prompt.stop)
    return deltas if checked is None else checked_deltas(deltas, checked)


def _empty(finish_reason: str | None) -> EmptyReply:
    ended = f" (it ended with {finish_reason})" if finish_reason not in (None, "stop") else ""
    return EmptyReply(f"The model's reply holds no answer{ended}.")


def _reported(error: GenerationFailed, model: str, latency_ms: int, *, started: bool) -> GenerationFailed:
    """The error as callers get it. It does not keep the kind of the failure: the model has been retried already."""
    details = {**error.details, "model_path": model, "latency_ms": latency_ms}
    reported = type(error)(f"{FAILED}{error.message}", **details)
    reported.known_reason, reported.started = error.reason, started
    return reported


def _since(began: float, clock: Clock) -> int:
    return round((clock.monotonic() - began) * 1000)
