"""The Ask screen in a real browser: sources, streamed answers, citations at the words, reload, follow-up."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect
from reportlab.pdfgen.canvas import Canvas

from anabranch.domain.model import Endpoint
from anabranch.testing import Document, Failure, Space
from support.browser import Visit, chromium, visit
from support.collection_server import Library, form, library
from support.cutting_proxy import CuttingProxy
from support.paused_model import PausedModel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("page-ask")]

WARRANTY = "A bicycle frame has a warranty of twelve years."
REFUND = "Customers may return a bicycle within thirty days and get the full price back."
LAMPS = "The repair shop in Basel replaces broken lamps on Tuesdays."
REMOTE = "Couriers deliver spare wheels to mountain huts in August."
HANDBOOK = f"""# Handbook

Some words about the shop.

## Warranty

{WARRANTY} **Keep the bill.**

| part | years |
|---|---|
| frame | 12 |
| chain | 1 |
"""
ATTACK = """# <img src=x onerror="window.hacked = 1">

<script>window.hacked = 1</script> [click](javascript:window.hacked=1) ![x](https://evil.example/x.png)

The penguin bridge closes at nine in the evening. <b onmouseover="window.hacked=1">Bold</b>
"""


# Shows an answer from the events of its stream; `apply` is kept, so that more can follow.
SHOW = """async (events) => {
  const { AnswerState, AnswerView } = await import("/page/answer.js");
  const state = new AnswerState("A question", {});
  const view = new AnswerView(state);
  document.body.classList.add("asked");
  document.querySelector(".turns").append(view.element);
  window.apply = (events) => {
    for (const [event, body] of events) state.apply({ event, data: JSON.stringify(body) });
    view.draw();
  };
  apply(events);
}"""
# The words of a text that stand elsewhere when they are marked by their offsets.
MISPLACED = """async ([source, kind]) => {
  const module = await import("/page/markdown.js");
  const { h } = await import("/page/dom.js");
  const words = [...source.matchAll(/[a-z]{3,}/gi)].filter((one) => !source.slice(0, one.index).endsWith("&"));
  const marked = ({ 0: word, index: start }) => {
    const range = { start, end: start + word.length, wrap: (text) => h("mark", null, text) };
    const shown = module[kind](source, module.decorator(source, [range]).decorate);
    return [...shown.querySelectorAll("mark")].map((one) => one.textContent).join("");
  };
  return words.filter((one) => marked(one) !== one[0]).map((one) => one[0]);
}"""


# When the first content was painted; it may be a moment after the script was ready.
FIRST_PAINT = """() => new Promise((resolve) => {
  const seen = (list) => list.getEntriesByName("first-contentful-paint").forEach((one) => resolve(one.startTime));
  new PerformanceObserver(seen).observe({ type: "paint", buffered: true });
})"""


class House(NamedTuple):
    library: Library
    space: Space
    model: PausedModel

    @property
    def url(self) -> str:
        return self.library.server.url


def pdf() -> bytes:
    written = BytesIO()
    canvas = Canvas(written)
    for words in ("Terms of the shop.", REFUND):
        canvas.drawString(72, 720, words)
        canvas.showPage()
    canvas.save()
    return written.getvalue()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("data")
    async with Space() as space, PausedModel() as model:
        space.source("mountain", documents=[Document(title="Couriers", content=REMOTE)])
        space.fails("broken", Failure.STATUS_500)
        space.fails("silent", Failure.HANG)
        sources = {
            name: Endpoint(slug=name, url=space.url, name=name, operator=True)
            for name in ("mountain", "broken", "silent")
        }
        writer = Endpoint(slug="writer", url=model.url, kind="openai", name="writer", operator=True)
        given = {"sources": sources, "models": {"writer": writer}, "retrieval_timeout": 1.0}
        async with library(folder, models_dir, rate_limit=0, **given) as opened:
            await opened.collection("handbook")
            data = form(
                ("terms.pdf", pdf()),
                ("handbook.md", HANDBOOK.encode()),
                ("lamps.html", f"<h1>Lamps</h1><p>{LAMPS}</p>".encode()),
                ('<img src=x onerror="window.hacked = 1">.md', ATTACK.encode()),
                collection_id="handbook",
            )
            accepted = await opened.call("POST", "/v1/ingest", data=data)
            await opened.job(accepted.body["job_id"])
            yield House(opened, space, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def only(page: Visit, *names: str, model: str = "extractive") -> None:
    """Choose what is asked, as the dialog would keep it."""
    collections = [name for name in names if name == "handbook"]
    scope = {"collections": collections, "sources": [one for one in names if one != "handbook"], "model": model}
    await page.page.evaluate("(scope) => localStorage.setItem('anabranch.scope', scope)", json.dumps(scope))
    await page.page.reload()


async def test_a_question_is_answered_with_a_citation_that_opens_markdown_at_the_words(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook")
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        await expect(page.page.locator(".chip.success")).to_contain_text("Your collections")
        await expect(page.page.locator(".chip.success .chip-detail")).to_contain_text(" ms")
        await expect(page.page.locator(".answer-text")).to_contain_text(WARRANTY)
        await page.page.get_by_role("button", name="Citation 1").first.click()
        await expect(page.page.locator("#panel mark").first).to_be_in_viewport()
        assert WARRANTY in await page.page.locator("#panel .document p:has(mark)").first.inner_text()
        assert await page.page.locator("#panel h4").first.inner_text() == "Warranty"
        assert await page.page.locator("#panel strong").inner_text() == "Keep the bill."
        assert await page.page.locator("#panel th").first.inner_text() == "part"
        await page.page.keyboard.press("Escape")
        await expect(page.page.locator("#panel")).to_be_hidden()


async def test_a_citation_opens_a_pdf_at_its_page_and_a_remote_passage_at_the_words(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook")
        await page.ask("Within how many days may customers return a bicycle?")
        await page.answered()
        await page.page.locator(".sentence").first.click()
        await expect(page.page.locator("#panel .panel-meta")).to_contain_text("page 2 of 2")
        await expect(page.page.locator(".cited-where").first).to_contain_text("page 2")
        marked = page.page.locator("#panel .page:has(mark)")
        assert (await marked.locator("h3").inner_text()).lower() == "page 2"
        assert await marked.locator("mark").inner_text() in REFUND

        await only(page, "mountain")
        await page.ask("When do couriers deliver spare wheels?")
        await page.answered(2)
        await page.page.locator(".turn").last.locator("button.cite").first.click()
        await expect(page.page.locator("#panel .panel-meta")).to_contain_text("From mountain")
        assert await page.page.locator("#panel mark").inner_text() in REMOTE


async def test_a_source_that_fails_and_one_that_is_slow_are_named_and_the_others_answer(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook", "broken", "silent")
        await page.ask("How long is the warranty of a bicycle frame?")
        await expect(page.page.locator(".chip.asked", has_text="silent")).to_be_visible()
        await page.answered()
        failed = page.page.locator(".chip.failed", has_text="broken")
        await expect(failed).to_contain_text("failed")
        await expect(failed.locator(".chip-error")).to_be_hidden()
        await failed.locator("summary").click()
        await expect(failed.locator(".chip-error")).to_be_visible()
        await expect(failed.locator(".chip-error")).not_to_be_empty()
        await expect(page.page.locator(".chip.failed", has_text="silent")).to_contain_text("too slow")
        await expect(page.page.locator(".answer-text")).to_contain_text(WARRANTY)
        await page.page.locator("details.run summary").click()
        rows = await page.page.locator(".waterfall tbody th").all_inner_texts()
        assert rows[:3] == ["Your collections", "broken", "silent"]
        assert rows[-1] == "Done"
        assert {"Merge", "First token"} <= set(rows)


async def test_an_answer_streams_survives_a_reload_and_a_follow_up_has_the_history(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook", model="writer")
        house.model.says("A frame has a warranty of twelve years. [1]", " A chain lasts ninety years.", paused=True)
        await page.ask("How long is the warranty of a frame?")
        await expect(page.page.locator(".answer-text")).to_contain_text("A frame has a warranty of twelve years.")
        await expect(page.page.get_by_role("button", name="Stop")).to_be_visible()
        await page.page.reload()
        await expect(page.page.locator(".answer-text")).to_contain_text("A frame has a warranty of twelve years.")
        house.model.go.set()
        await page.answered()
        await expect(page.page.locator(".answer-text")).to_contain_text("A chain lasts ninety years.")
        await expect(page.page.get_by_role("status").filter(has_text="Answer complete, 50% supported")).to_be_attached()
        await expect(page.page.locator(".turn")).to_have_count(1)
        verdicts = page.page.locator(".verdict")
        await expect(verdicts).to_have_count(2)
        assert "Supported" in str(await verdicts.first.get_attribute("aria-label"))
        assert "Supported" not in str(await verdicts.last.get_attribute("aria-label"))

        house.model.says("One year. [1]")
        await page.ask("And of a chain?")
        await page.answered(2)
        assert "How long is the warranty of a frame?" in house.model.asked[-1]


async def begin(page: Visit, house: House, first: str = "A frame has", rest: str = " a warranty.") -> None:
    """Ask, and wait until the model pauses in the middle of its answer."""
    await page.open()
    await only(page, "handbook", model="writer")
    house.model.says(first, rest, paused=True)
    await page.ask("How long is the warranty of a frame?")
    await expect(page.page.locator(".answer-text")).to_contain_text("A frame has")


async def test_a_stopped_answer_keeps_its_citations_and_can_be_copied_and_asked_again(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await begin(page, house, "A frame has a warranty of twelve years. [1] A chain")
        await expect(page.page.locator(".verdict")).to_have_count(1)
        connections = house.model.open_connections
        await page.page.get_by_label("Question").press("Enter")
        await expect(page.page.locator(".toast")).to_have_count(0)
        await page.ask("And a chain?")
        await expect(page.page.get_by_text("still being answered")).to_be_visible()
        await page.page.get_by_role("button", name="Stop").press("Enter")
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await expect(page.page.locator(".answer-foot")).to_contain_text("Stopped after")
        await expect(page.page.locator(".problem")).to_have_count(0)
        await expect(page.page.get_by_role("button", name="Citation 1")).to_be_visible()
        await expect(page.page.get_by_role("button", name="Copy")).to_be_visible()
        assert "[1]" not in await page.page.locator(".answer-text").inner_text()
        await house.space.wait_for(lambda: house.model.open_connections < connections)

        house.model.says("Twelve years. [1]")
        await page.page.get_by_role("button", name="Ask again").click()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await expect(page.page.locator(".answer-text")).to_contain_text("Twelve years.")
        await expect(page.page.locator(".turn")).to_have_count(1)
        await page.page.get_by_role("link", name="Activity").click()
        await expect(page.page.locator("td .badge", has_text="Stopped").first).to_be_visible()


async def test_a_new_conversation_ends_the_running_answer_and_can_be_asked(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await begin(page, house)
        await page.page.get_by_role("button", name="New conversation").click()
        await expect(page.page.locator(".turn")).to_have_count(0)
        house.model.says("One year. [1]")
        await page.ask("How long is the warranty of a chain?")
        await page.answered()
        await expect(page.page.locator(".turn")).to_have_count(1)
        assert "warranty of a frame" not in house.model.asked[-1]


async def test_the_link_of_an_annotation_opens_the_document_at_the_words(browser: Browser, house: House) -> None:
    asked = {"model": "handbook", "messages": [{"role": "user", "content": "How long is the warranty of a frame?"}]}
    house.model.says(f"{WARRANTY} [1]")
    answer = await house.library.good("POST", "/v1/chat/completions", json=asked)
    link = answer["choices"][0]["message"]["annotations"][0]["url_citation"]["url"]
    async with visit(browser, house.url) as page:
        await page.page.goto(link)
        await expect(page.page.locator("#panel mark").first).to_be_in_viewport()
        assert await page.page.locator("#panel mark").first.inner_text() in WARRANTY
        await expect(page.page.get_by_label("Question")).to_be_visible()


async def test_a_screen_that_loads_late_is_not_shown_over_the_next_one(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        held = asyncio.Event()

        async def hold(route: Route) -> None:
            await held.wait()
            await route.continue_()

        await page.page.route("**/v1/collections", hold)
        await page.page.get_by_role("link", name="Library").click()
        await page.page.get_by_role("link", name="Streams").click()
        await expect(page.page.get_by_role("heading", name="Streams")).to_be_visible()
        async with page.page.expect_response("**/v1/collections"):
            held.set()
        await expect(page.page.get_by_role("heading", name="Library")).to_have_count(0)
        await page.page.locator(".skip").focus()
        await page.page.keyboard.press("Enter")
        await expect(page.page.locator("main")).to_be_focused()
        await expect(page.page.get_by_role("heading", name="Streams")).to_be_visible()


async def test_tables_that_a_short_text_makes_huge_do_not_freeze_the_page(browser: Browser, house: House) -> None:
    spaces = " " * 100_000
    texts = [f"|a|\n{spaces}x|-\n", "|a" * 90 + "\n" + "|-" * 90 + "\n" + "|x\n" * 20_000]
    async with visit(browser, house.url) as page:
        await page.open()
        took_ms = await page.page.evaluate(
            """async (texts) => {
              const { decorator, markdown } = await import("/page/markdown.js");
              const began = performance.now();
              for (const text of texts) markdown(text, decorator(text, []).decorate);
              return performance.now() - began;
            }""",
            texts,
        )
        assert took_ms < 5_000


async def test_hostile_documents_execute_nothing(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook")
        await page.ask("When does the penguin bridge close?")
        await page.answered()
        await page.page.locator(".sentence").first.click()
        await expect(page.page.locator("#panel mark").first).to_be_visible()
        shown = await page.page.locator("#panel .document").inner_text()
        assert "<script>window.hacked = 1</script>" in shown
        assert await page.page.locator("#panel .document a").count() == 0
        assert await page.page.locator("#panel img, #panel script, #panel b, main img, main script").count() == 0
        await page.page.goto(f"{house.url}/#/library/handbook")
        await expect(page.page.get_by_text("onerror").first).to_be_visible()
        assert await page.page.evaluate("() => window.hacked") is None


async def test_an_answer_can_be_explained_copied_exported_rated_and_opened_by_its_link(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        await page.open()
        await only(page, "handbook")
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        await page.page.get_by_role("button", name="Explain").click()
        await expect(page.page.locator("#panel .explained").first).to_contain_text("in the prompt")
        await page.page.get_by_role("button", name="Copy").click()
        await expect(page.page.get_by_text("Copied as Markdown")).to_be_visible()
        copied = await page.page.evaluate("() => navigator.clipboard.readText()")
        assert "## How long is the warranty" in copied
        assert "### Sources" in copied
        async with page.page.expect_download() as download:
            await page.page.get_by_role("button", name="Export").click()
        path = await (await download.value).path()
        exported = json.loads(await asyncio.to_thread(path.read_text))
        assert exported["citations"]
        await page.page.get_by_role("button", name="Good answer").click()
        await page.page.get_by_role("button", name="Add a comment").click()
        await page.page.get_by_label("What was right or wrong?").fill("Short.")
        await page.page.get_by_role("button", name="Send").click()
        await expect(page.page.get_by_text("Thank you for the comment.")).to_be_visible()
        rated = await house.library.good("GET", "/v1/feedback")
        assert [(one["rating"], one["comment"]) for one in rated["feedback"]] == [("thumbs_up", "Short.")]
        await page.page.reload()
        await expect(page.page.get_by_role("button", name="Good answer")).to_have_attribute("aria-pressed", "true")
        await expect(page.page.get_by_role("button", name="Bad answer")).to_have_attribute("aria-pressed", "false")
        await page.page.get_by_role("button", name="Share").click()
        await expect(page.page.get_by_text("Link copied")).to_be_visible()
        link = await page.page.evaluate("() => navigator.clipboard.readText()")
        await page.page.goto("about:blank")
        await page.page.goto(link)
        await expect(page.page.locator(".answer-text")).to_contain_text(WARRANTY)
        await page.page.locator("button.cite").first.click()
        await expect(page.page.locator("#panel mark").first).to_be_visible()


async def test_the_page_works_with_the_keyboard_only(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook")
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await page.page.keyboard.type("How long is the warranty of a bicycle frame?")
        await page.page.keyboard.press("Enter")
        await page.answered()
        await page.page.locator(".question").first.evaluate("(element) => { element.tabIndex = -1; element.focus(); }")
        await page.page.keyboard.press("Tab")
        await expect(page.page.locator(".tip")).to_contain_text("Supported")
        await page.page.keyboard.press("Enter")
        await expect(page.page.locator("#panel mark").first).to_be_visible()
        await page.page.keyboard.press("Escape")
        await expect(page.page.locator("button.cite").first).to_be_focused()


async def test_axe_finds_no_violation_beside_a_failed_source_in_dark_and_narrow(browser: Browser, house: House) -> None:
    for options in ({"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}):
        async with visit(browser, house.url, **options) as page:
            await page.open()
            await only(page, "handbook", "broken")
            await page.ask("How long is the warranty of a bicycle frame?")
            await page.answered()
            await page.page.locator("button.cite").first.click()
            await expect(page.page.locator("#panel mark").first).to_be_visible()
            assert await page.violations_of_accessibility() == []
            assert await page.page.locator(".nowrap .verdict").count() > 0
            lines = "(all) => all.map((one) => new Set([...one.getClientRects()].map((box) => box.bottom)).size)"
            assert set(await page.page.locator(".nowrap").evaluate_all(lines)) == {1}
            wide = await page.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0


async def test_the_page_is_small_fast_and_described_for_clients_that_ask_for_json(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        sizes: list[int] = []
        page.page.on("response", lambda response: sizes.append(int(response.headers.get("content-length", "0"))))
        await page.open()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        assert await page.page.evaluate("() => performance.now()") < 2_000
        assert await page.page.evaluate(FIRST_PAINT) < 1_000
        assert 0 < sum(sizes) < 300_000
    folder = Path(__file__).parents[2] / "src/anabranch/web"
    assert sum(file.stat().st_size for file in [*(folder / "page").iterdir(), folder / "stream.js"]) < 300_000
    async with aiohttp.ClientSession() as session:
        async with session.get(house.url, headers={"Accept": "application/json"}) as response:
            assert (await response.json())["links"]["openapi"] == "/openapi.json"
        async with session.get(house.url) as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            etag = response.headers["ETag"]
        async with session.get(house.url, headers={"If-None-Match": etag}) as response:
            assert response.status == 304
        async with session.get(f"{house.url}/page/..%2Fdocs.html") as response:
            assert response.status == 404


async def test_a_copied_answer_has_the_citations_and_the_characters_that_are_shown(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        await page.open()
        await only(page, "handbook", "mountain", model="writer")
        house.model.says(f"{WARRANTY} [1] {REMOTE}\n\nThe bill is a List<String>, not `List&lt;int>`.")
        await page.ask("How long is the warranty of a frame? When do couriers deliver spare wheels?")
        await page.answered()
        shown = await page.page.locator(".answer-text").inner_text()
        assert "List<String>, not List&lt;int>" in shown
        assert await page.page.locator(".answer-text button.cite").all_inner_texts() == ["2", "1"]
        await page.page.get_by_role("button", name="Copy").click()
        await expect(page.page.get_by_text("Copied as Markdown")).to_be_visible()
        copied = await page.page.evaluate("() => navigator.clipboard.readText()")
        assert f"{WARRANTY} [2] {REMOTE} [1]" in copied
        assert "List<String>, not `List&lt;int>`" in copied
        assert "[1] Couriers" in copied


async def test_a_kept_answer_has_the_marks_that_were_shown_while_it_was_written(browser: Browser, house: House) -> None:
    marks = ".answer-text .cite"
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook", model="writer")
        house.model.says(f"{WARRANTY[:-1]} [2][3]. The dragon of the shop sleeps in the cellar. [2][4]")
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        live = await page.page.locator(marks).all_inner_texts()
        crossed_out = await page.page.locator(".cite.unproven").count()
        assert (len(live), crossed_out) == (3, 2), "two corrected marks in a row are one"
        [logged] = (await house.library.good("GET", "/v1/queries?limit=1"))["queries"]
        await page.page.goto(f"{house.url}/#/answers/{logged['id']}")
        await expect(page.page.locator(f".shared {marks}")).to_have_text(live)
        await expect(page.page.locator(".shared .cite.unproven")).to_have_count(crossed_out)


async def test_a_kept_answer_from_a_remote_source_shows_its_evidence(browser: Browser, house: House) -> None:
    asked = await house.library.ask("When do couriers deliver wheels?", sources=["mountain"], model="extractive")
    async with visit(browser, house.url) as page:
        await page.open(f"#/answers/{asked['query_id']}")
        await expect(page.page.locator(".cited")).to_contain_text("mountain")
        await expect(page.page.locator(".shared .meta").first).to_contain_text("Asked")
        await page.page.locator("button.cite").first.click()
        await expect(page.page.locator("#panel mark")).to_have_text(REMOTE)
        await page.page.locator(".verdict").click()
        await expect(page.page.locator("#panel mark")).to_have_text(REMOTE)
        await expect(page.page.get_by_role("button", name="Share")).to_be_visible()
        await page.page.emulate_media(media="print")
        await expect(page.page.locator("#panel")).to_be_hidden()

        async def of_others(route: Route) -> None:
            response = await route.fetch()
            await route.fulfill(response=response, json={**await response.json(), "may_share": False})

        await page.page.route("**/v1/queries/*", of_others)
        await page.page.reload()
        await expect(page.page.locator(".cited")).to_be_attached()
        await expect(page.page.get_by_role("button", name="Share")).to_have_count(0)
        await page.page.unroute("**/v1/queries/*")
        await page.open("#/answers/none")
        await expect(page.page.locator("main")).to_contain_text("does not exist, or you may not read it")
        await expect(page.page.get_by_role("button", name="Try again")).to_have_count(0)


def _sentence(text: str, answer: str, *quotes: tuple[int, int]) -> dict[str, Any]:
    start = answer.index(text)
    place = {"citation_index": 1, "source": "mountain", "document_id": "m", "chunk_id": "c", "page": None}
    cited = [{**place, "start_char": one, "end_char": end, "quoted_text": "x", "support": 1.0} for one, end in quotes]
    known = {"start": start, "end": start + len(text), "text": text, "reason": None, "doubted": [], "citations": cited}
    return {**known, "verdict": "supported" if quotes else "unchecked", "support": None}


async def test_one_mark_for_two_quotes_is_shown_once_with_both_and_marks_stay_at_their_block(
    browser: Browser, house: House
) -> None:
    table = "| part | years |\n|---|---|\n| frame | 12 | [1]\n\n```\nframe 12\n```\n\n[1]"
    row = _sentence("| frame | 12 | [1]", table, (0, 5), (10, 15))
    mark = {"answer_start": table.index("[1]"), "answer_end": table.index("[1]") + 3}
    cited = [{**one, **mark} for one in row["citations"]]
    last = {**cited[0], "answer_start": table.rindex("[1]"), "answer_end": len(table)}
    passage = {"citation_index": 1, "source": "mountain", "collection": "", "title": "Parts", "section_title": "Parts"}
    events = [
        ["fallback", {"from": "writer", "message": "No connection", "model": "extractive"}],
        ["token", {"text": table}],
        ["sources", {"sources": [{**passage, "text": "Parts and years"}]}],
        ["done", {"citations": [*cited, last], "sentences": [row], "latency_ms": 1, "usage": {"model": "extractive"}}],
    ]
    async with visit(browser, house.url) as page:
        await page.open()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await page.page.evaluate(SHOW, events)
        await expect(page.page.locator(".answer-text button.cite")).to_have_count(2)
        await expect(page.page.locator("td button.cite")).to_have_count(1)
        await expect(page.page.locator("pre + .marks button.cite")).to_have_count(1)
        await expect(page.page.locator(".cited-where")).to_have_text("mountain")
        await expect(page.page.locator(".note")).to_have_text(
            "writer did not answer: No connection. The documents are quoted instead."
        )
        await page.page.locator("td button.cite").click()
        assert await page.page.locator("#panel mark").all_inner_texts() == ["Parts", "years"]

        await page.page.locator(".answer-text .verdict").hover()
        await expect(page.page.locator(".tip")).to_be_visible()
        await page.page.keyboard.press("Escape")
        await expect(page.page.locator(".tip")).to_have_count(0)
        await expect(page.page.locator("#panel")).to_be_visible()


async def test_finished_paragraphs_stay_as_they_are_while_an_answer_is_written(browser: Browser, house: House) -> None:
    answer = "Wheels are **round**. Spokes are thin.\n\n- Tyres are black.\n- Rims"
    first = _sentence("Wheels are **round**.", answer, (0, 5))
    same = "() => document.querySelector('.answer-text p') === window.paragraph"
    async with visit(browser, house.url) as page:
        await page.open()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await page.page.evaluate(SHOW, [["token", {"text": answer}], ["sentence", {"index": 0, "sentence": first}]])
        await page.page.locator(".verdict").focus()
        await page.page.evaluate("() => { window.paragraph = document.querySelector('.answer-text p'); }")
        more = " are made of steel.\n\nThat is all."
        await page.page.evaluate("(text) => apply([['token', { text }]])", more)
        await expect(page.page.locator(".answer-text li")).to_have_text(["Tyres are black.", "Rims are made of steel."])
        assert await page.page.evaluate(same)
        await expect(page.page.locator(".verdict")).to_be_focused()
        # Another sentence in it is drawn, and the focus stays at its mark.
        second = {"index": 1, "sentence": _sentence("Spokes are thin.", answer, (0, 5))}
        await page.page.evaluate("(sentence) => apply([['sentence', sentence]])", second)
        await expect(page.page.locator(".verdict")).to_have_count(2)
        await expect(page.page.locator(".verdict").first).to_be_focused()
        assert not await page.page.evaluate(same)


async def test_the_conversation_outlives_a_reload_when_the_storage_is_full(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await only(page, "handbook")
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        await page.page.evaluate(
            """() => {
              const most = sessionStorage.getItem("anabranch.conversation").length + 100;
              const { setItem } = Storage.prototype;
              Storage.prototype.setItem = function (name, value) {
                if (value.length > most) throw new DOMException("full", "QuotaExceededError");
                setItem.call(this, name, value);
              };
            }"""
        )
        await page.ask("Within how many days may customers return a bicycle?")
        await page.answered(2)
        await page.page.reload()
        await expect(page.page.locator(".turn").last).to_contain_text("thirty days")
        await page.page.evaluate("() => sessionStorage.clear()")


async def test_a_lost_connection_is_said_until_it_is_back_or_the_answer_is_gone(browser: Browser, house: House) -> None:
    async with CuttingProxy(house.url) as proxy, visit(browser, proxy.url) as page:
        await page.page.clock.install()
        await begin(page, house)
        status = page.page.locator(".answer-status")
        proxy.cut()
        await expect(status).to_have_text("Connection lost, trying again…")
        await expect(page.page.locator(".caret")).to_have_count(0)
        await page.page.clock.fast_forward(10_000)
        await expect(page.page.locator(".caret")).to_have_count(1)
        await expect(status).to_be_empty()
        gone = {"code": "not_found", "message": "There is no such stream."}
        await page.page.route("**/v1/streams/*", lambda route: route.fulfill(status=404, json=gone))
        proxy.cut()
        await expect(status).to_have_text("Connection lost, trying again…")
        await page.page.clock.fast_forward(20_000)
        await expect(page.page.locator(".problem")).to_have_text("This answer is no longer kept. Ask again.")


async def test_what_an_address_brings_along_is_used_once(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await page.open("#/ask?q=When%3F&collection=handbook")
        await expect(page.page.get_by_label("Question")).to_have_value("When?")
        await expect(page.page).to_have_url(f"{house.url}/#/ask")
        await expect(page.page.locator(".composer")).to_contain_text("handbook")
        await page.page.reload()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await expect(page.page.get_by_label("Question")).to_have_value("")
        await expect(page.page.locator(".composer")).to_contain_text("handbook")


async def test_a_question_without_any_documents_is_not_sent_but_leads_to_the_library(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.page.route("**/v1/collections", lambda route: route.fulfill(json={"collections": []}))
        await page.page.route("**/v1/sources", lambda route: route.fulfill(json={"sources": []}))
        await page.open()
        await page.ask("How long is the warranty?")
        await expect(page.page.locator(".toast")).to_contain_text("There are no documents yet.")
        await expect(page.page.get_by_label("Question")).to_have_value("How long is the warranty?")
        await expect(page.page.locator(".turn")).to_have_count(0)
        await page.page.locator(".toast").get_by_role("button", name="Add documents").click()
        await expect(page.page.get_by_role("heading", name="Library")).to_be_visible()


async def test_markdown_as_models_and_documents_write_it_is_rendered_at_its_offsets(
    browser: Browser, house: House
) -> None:
    written = (
        "Title &amp; more\n=====\n\nSecond &lt;title&gt;\n---\n\n"
        "first line  \nsecond\\\nthird ~~gone~~ ***both*** `&lt;`\n\n"
        "- [ ] open task\n- [x] done task\n---\n\n"
        "| cell | other |\n|---|---|\n| &euro; five | &#x41; six &unknown; |\n"
    )
    other = (
        "Names\n\n- first entry\n  - inner entry\n1. numbered\nfurther\n\n"
        "name | price\nwheel | &lt; five\n\nalone | here"
    )
    async with visit(browser, house.url) as page:
        await page.open()
        html = """async ([source, kind]) => {
          const { decorator, markdown, plain } = await import("/page/markdown.js");
          const { h } = await import("/page/dom.js");
          return h("div", null, { markdown, plain }[kind](source, decorator(source, []).decorate)).innerHTML;
        }"""
        shown = await page.page.evaluate(html, [written, "markdown"])
        for part in (
            '<h3 class="level-1">Title &amp; more</h3><h4 class="level-2">Second &lt;title&gt;</h4>',
            "<p>first line<br>second<br>third <del>gone</del> <strong><em>both</em></strong> <code>&amp;lt;</code></p>",
            '<ul><li class="task">open task</li><li class="task done">done task</li></ul><hr>',
            "<td>€ five</td><td>A six &amp;unknown;</td>",
        ):
            assert part in shown
        shown = await page.page.evaluate(html, [other, "plain"])
        assert re.findall(r"<li[^>]*>([^<]*)</li>", shown) == ["first entry", "inner entry", "numbered\nfurther"]
        assert re.findall(r"<td>([^<]*)</td>", shown) == ["name", "price", "wheel", "&amp;lt; five"]
        assert '<p class="plain">alone | here</p>' in shown
        for source, kind in ((written, "markdown"), (other, "plain")):
            found = await page.page.evaluate(MISPLACED, [source, kind])
            assert [one for one in found if one not in ("euro", "unknown")] == []
