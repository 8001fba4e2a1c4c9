"""The Ask screen in a real browser: sources, streamed answers, citations at the words, reload, follow-up."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect
from reportlab.pdfgen.canvas import Canvas

from anabranch.domain.model import Endpoint
from anabranch.testing import Document, Failure, Space
from support.browser import Visit, chromium, visit
from support.collection_server import Library, form, library
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
        await expect(page.page.locator(".turn")).to_have_count(1)
        verdicts = page.page.locator(".verdict")
        await expect(verdicts).to_have_count(2)
        assert "Supported" in str(await verdicts.first.get_attribute("aria-label"))
        assert "Supported" not in str(await verdicts.last.get_attribute("aria-label"))

        house.model.says("One year. [1]")
        await page.ask("And of a chain?")
        await page.answered(2)
        assert "How long is the warranty of a frame?" in house.model.asked[-1]


async def begin(page: Visit, house: House) -> None:
    """Ask, and wait until the model pauses in the middle of its answer."""
    await page.open()
    await only(page, "handbook", model="writer")
    house.model.says("A frame has", " a warranty.", paused=True)
    await page.ask("How long is the warranty of a frame?")
    await expect(page.page.locator(".answer-text")).to_contain_text("A frame has")


async def test_an_answer_can_be_stopped(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await begin(page, house)
        connections = house.model.open_connections
        await page.page.get_by_role("button", name="Stop").click()
        await expect(page.page.locator(".problem")).to_contain_text("topped")
        await house.space.wait_for(lambda: house.model.open_connections < connections)
        await expect(page.page.get_by_role("button", name="Ask", exact=True)).to_be_visible()


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
        painted = await page.page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert painted < 1_000
        assert 0 < sum(sizes) < 300_000
        assert await page.page.evaluate("() => performance.now()") < 2_000
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
