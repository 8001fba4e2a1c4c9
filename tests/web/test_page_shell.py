"""What all screens share, in a real browser: the focus, dialogs and notices, the panel, names that are hard to show, a
connection that is lost, and another user in another tab."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, Route, expect

from support.browser import Visit, chromium, visit
from support.collection_server import Library, library, text

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("page-shell")]

NARROW: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
LONG = "annual" * 25
# It reverses what follows it: the title would read "exe.png".
REVERSING = "\u202egnp.exe"
HEBREW = "\u05db\u05de\u05d4 \u05e2\u05d5\u05dc\u05d4 \u05d4\u05de\u05e0\u05d5\u05d9?"
FRAME = "A bicycle frame has a warranty of twelve years."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Library]:
    async with library(tmp_path_factory.mktemp("data"), models_dir, rate_limit=0, auth="api_key") as opened:
        await opened.collection("shop", who="root")
        titles = ("Warranty", LONG, REVERSING)
        documents = [text(f"{FRAME} This is copy {index}.", title=title) for index, title in enumerate(titles)]
        await opened.ingest("shop", *documents, who="root")
        await opened.collection(".", who="root")
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def signed_in(house: Library, who: str, page: Visit) -> None:
    """Sign in without this page, as another tab does."""
    url, headers = f"{page.url}/v1/session", {"X-Anabranch-CSRF": "1"}
    await page.page.context.request.post(url, data={"key": house.secrets[who]}, headers=headers)


async def sign_in(page: Visit, house: Library, address: str = "") -> None:
    await signed_in(house, "root", page)
    await page.open(address)


async def overflow(shown: Locator) -> int:
    """How many pixels are beyond the right edge."""
    return int(await shown.evaluate("(element) => element.scrollWidth - element.clientWidth"))


async def press(page: Page, control: Locator) -> None:
    await control.focus()
    await page.keyboard.press("Enter")


async def test_a_notice_over_a_dialog_is_read_and_dismissed_there_and_the_dialog_stays(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        await sign_in(page, house, address="#/activity/keys")
        await page.page.get_by_role("button", name="New key").click()
        await page.page.get_by_label("User").fill("dora")
        await page.page.keyboard.press("Enter")
        box = page.page.get_by_role("dialog")
        await box.get_by_role("button", name="Copy").click()
        await expect(box.get_by_role("status")).to_contain_text("Key copied.")
        await box.get_by_role("button", name="Dismiss").click()
        await expect(page.page.get_by_text("Key copied.")).to_have_count(0)
        await press(page.page, box.get_by_role("button", name="Done"))
        await expect(box).to_have_count(0)
        # The button that opened the dialog was drawn again meanwhile.
        await expect(page.page.get_by_role("heading", name="Activity")).to_be_focused()


async def test_a_new_screen_closes_dialogs_and_the_focus_goes_to_its_heading_and_is_never_lost(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url) as page:
        await sign_in(page, house)
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await press(page.page, page.page.get_by_role("link", name="Library"))
        await expect(page.page.get_by_role("heading", name="Library")).to_be_focused()
        await page.page.goto(f"{page.url}/#/library/shop")
        await expect(page.page.get_by_role("heading", name="shop")).to_be_focused()
        await page.page.get_by_role("button", name="Paste text").click()
        await page.page.go_back()
        await expect(page.page.get_by_role("heading", name="Library")).to_be_focused()
        await expect(page.page.locator("dialog")).to_have_count(0)
        await page.page.go_forward()

        await press(page.page, page.page.get_by_role("button", name="Delete: Warranty"))
        await press(page.page, page.page.get_by_role("button", name="Undo (Ctrl+Z)"))
        await expect(page.page.get_by_role("button", name="Delete: Warranty")).to_be_visible()
        await expect(page.page.get_by_role("heading", name="shop")).to_be_focused()

        await page.page.get_by_role("button", name="Publish").click()
        box = page.page.get_by_role("dialog")
        await expect(box).to_contain_text("is an address of this machine only")
        await press(page.page, box.locator("button[type=submit]"))
        await press(page.page, box.get_by_role("button", name="Withdraw"))
        await expect(box).to_contain_text("It is not published yet.")
        await expect(box.get_by_role("heading", name="Publish shop")).to_be_focused()
        await page.page.keyboard.press("Escape")
        await expect(page.page.get_by_role("button", name="Publish")).to_be_focused()
        # The same control, drawn again, keeps the focus.
        who = page.page.get_by_role("button", name="Who may see it: Warranty")
        await press(page.page, who)
        async with page.page.expect_response("**/v1/documents?*"):
            await press(page.page, box.get_by_role("button", name="Save"))
        await expect(who).to_be_focused()


async def test_a_panel_over_the_page_keeps_the_keyboard_until_it_is_closed_or_has_room(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url, viewport={"width": 1000, "height": 700}) as page:
        await sign_in(page, house, address="#/library/shop")
        opener = page.page.get_by_role("button", name="Warranty", exact=True)
        await opener.click()
        close = page.page.locator("#panel").get_by_role("button", name="Close")
        await expect(page.page.locator("#panel h2")).to_have_text("Warranty")
        await page.page.keyboard.press("Shift+Tab")
        assert await page.page.evaluate("() => document.activeElement.closest('.rail, main')") is None
        await page.page.set_viewport_size({"width": 1280, "height": 700})
        await expect(page.page.locator("main[inert]")).to_have_count(0)
        await page.page.get_by_role("link", name="Sources").focus()
        await page.page.set_viewport_size({"width": 1000, "height": 700})
        await expect(page.page.locator("#panel h2")).to_be_focused()
        await expect(close).to_be_visible()
        await page.page.mouse.click(300, 600)
        await expect(page.page.locator("#panel")).to_be_hidden()
        await expect(opener).to_be_focused()


async def test_a_tab_is_loaded_again_when_somebody_else_has_signed_in_in_another_one(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url) as page:
        await page.open()
        await expect(page.page.get_by_label("API key")).to_be_focused()
        await page.page.keyboard.press("Escape")
        await expect(page.page.get_by_role("heading", name="Sign in to ask")).to_be_focused()
        await signed_in(house, "root", page)
        await page.page.evaluate("() => dispatchEvent(new Event('focus'))")
        await expect(page.page.locator(".who")).to_have_text("root (operator)")
        await signed_in(house, "bob", page)
        await page.page.evaluate("() => dispatchEvent(new Event('focus'))")
        await expect(page.page.locator(".who")).to_have_text("bob")


async def test_names_without_spaces_with_dots_only_and_with_reversed_letters_are_shown_as_they_are(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url, **NARROW) as page:
        await sign_in(page, house, address="#/library")
        await page.page.get_by_role("link", name=".", exact=True).click()
        await expect(page.page.get_by_role("heading", name=".", exact=True)).to_be_visible()
        await page.page.goto(f"{page.url}/#/library/shop")
        await expect(page.page.get_by_role("button", name="gnp.exe", exact=True)).to_have_text("gnp.exe")
        await page.page.get_by_role("button", name=f"Who may see it: {LONG}").click()
        assert await overflow(page.page.locator("dialog")) == 0
        await page.page.keyboard.press("Escape")

        await page.page.goto(f"{page.url}/#/ask")
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        await page.page.get_by_role("button", name="Explain").click()
        await expect(page.page.locator(".explained", has_text=LONG).first).to_be_visible()
        assert await overflow(page.page.locator(".panel-body")) == 0
        await page.page.keyboard.press("Escape")
        await page.ask(HEBREW)
        mark, first = await page.page.locator(".question").last.evaluate(
            """(element) => [-1, 0].map((at) => {
              const range = document.createRange();
              const text = element.firstChild;
              const place = (at + text.length) % text.length;
              range.setStart(text, place);
              range.setEnd(text, place + 1);
              return range.getBoundingClientRect().left;
            })"""
        )
        assert mark < first


async def test_a_notice_with_an_action_stays_while_it_is_pointed_at_and_does_not_cover_the_question(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url) as page:
        await page.page.clock.install()
        await sign_in(page, house, address="#/library/shop")
        await page.page.get_by_role("button", name="Delete: Warranty").click()
        undo = page.page.get_by_role("button", name="Undo")
        await undo.hover()
        await page.page.clock.run_for(20_000)
        await undo.click()
        await expect(page.page.get_by_role("button", name="Delete: Warranty")).to_be_visible()
        await page.page.goto(f"{page.url}/#/ask")
        await expect(page.page.get_by_label("Question")).to_be_focused()
        for size in ((1280, 820), (360, 740)):
            await page.page.set_viewport_size({"width": size[0], "height": size[1]})
            await press(page.page, page.page.get_by_role("button", name="Theme"))
            await expect(page.page.get_by_role("button", name="Theme")).to_be_focused()
            notice = await page.page.locator(".toast").last.bounding_box()
            question = await page.page.get_by_label("Question").bounding_box()
            assert notice
            assert question
            assert notice["y"] + notice["height"] <= question["y"]
        await page.page.set_viewport_size({"width": 640, "height": 400})
        for fixed in (".rail", ".composer"):
            assert await page.page.locator(fixed).evaluate("(one) => getComputedStyle(one).position") == "static"
        await page.page.set_viewport_size({"width": 320, "height": 740})
        end = await page.page.get_by_role("button", name="Sign out").bounding_box()
        assert end
        assert end["x"] + end["width"] <= 316


async def test_a_lost_connection_is_said_in_words_and_what_failed_can_be_opened_again(
    browser: Browser, house: Library
) -> None:
    async with visit(browser, house.server.url) as page:
        await page.page.route("**/page/library.js", lambda route: route.abort())
        async with page.page.expect_response("**/page/streams.js"):
            await sign_in(page, house)
        await page.page.route("**/page/*.js", lambda route: route.abort())
        # It was loaded before it was wanted.
        await page.page.get_by_role("link", name="Streams").click()
        await expect(page.page.get_by_role("heading", name="What is a planner step?")).to_be_visible()
        await page.page.get_by_role("link", name="Library").click()
        await expect(page.page.locator("main")).to_contain_text("The connection was interrupted.")
        await page.page.unroute_all()
        held = asyncio.Event()

        async def hold(route: Route) -> None:
            await held.wait()
            await route.continue_()

        await page.page.route("**/v1/session", hold)
        await page.page.get_by_role("button", name="Try again").click()
        await expect(page.page.get_by_text("Loading…")).to_be_visible()
        held.set()
        await expect(page.page.get_by_role("heading", name="Library")).to_be_visible()

        await page.page.goto(f"{page.url}/#/ask")
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await page.page.route("**/v1/query", lambda route: route.abort())
        await page.ask("How long is the warranty?")
        await expect(page.page.locator(".problem")).to_contain_text("did not get through. Is the server running?")
        await page.page.route("**/v1/collections", lambda route: route.fulfill(body="<html>wifi</html>"))
        await page.page.goto(f"{page.url}/#/library")
        await expect(page.page.locator(".problem")).to_contain_text("did not come from this server")


async def test_forced_colours_keep_what_colours_alone_would_say(browser: Browser, house: Library) -> None:
    async with visit(browser, house.server.url, forced_colors="active") as page:
        await sign_in(page, house)
        await page.ask("How long is the warranty of a bicycle frame?")
        await page.answered()
        await page.page.locator("details.run summary").click()
        style = "(element, name) => getComputedStyle(element).getPropertyValue(name)"
        composer = page.page.locator(".composer")
        assert await composer.evaluate(style, "background-image") == "none"
        canvas = await page.page.locator("body").evaluate(style, "background-color")
        assert await composer.evaluate(style, "background-color") == canvas
        for coloured in (".track .bar", ".chip .dot"):
            assert await page.page.locator(coloured).first.evaluate(style, "background-color") != canvas
        current = page.page.locator(".nav-link[aria-current]")
        assert await current.evaluate(style, "outline-style") == "solid"
