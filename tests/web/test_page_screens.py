"""The other screens in a real browser: sign-in, library, sources, streams and activity; and pictures of all of them."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from playwright.async_api import Browser, FilePayload, Route, expect
from reportlab.pdfgen.canvas import Canvas

from anabranch.domain.model import Endpoint
from anabranch.testing import Document, Failure, Space
from support.browser import Visit, chromium, visit
from support.collection_server import Library, form, library, text
from support.paused_model import PausedModel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("page-screens")]

# `make screenshots` sets it to docs/screens.
PICTURES = os.environ.get("ANABRANCH_SCREENSHOTS")
DOCS = Path(__file__).parents[2] / "docs"
DARK: dict[str, Any] = {"color_scheme": "dark"}
NARROW: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
LEAVE = """# Leave policy

Employees get 30 days of parental leave. Parental leave is paid in full.

## How to apply

Applications are sent to the people team two months before the leave begins.

| leave | days | paid |
|---|---|---|
| parental | 30 | in full |
| study | 5 | half |

1. Tell your team **first**.
2. Send the form with the dates.
3. The people team answers within two weeks.
"""
TRAVEL = (
    "Journeys of more than two hours are made in first class.",
    "Receipts are handed in within thirty days. Meals are paid up to 40 francs a day.",
)
HANDBOOK = "# Handbook\n\nEmployees get 45 days of parental leave. The canteen opens at noon."
QUESTION = "How many days of parental leave do employees get?"
# One sentence for each verdict.
WRITTEN = """The leave policy says 30 days of parental leave [1], but the handbook says 45 days [2]. Parental leave is \
paid in full. [1]

The people team answers within two months. [1] Parents receive a gift from the company. [2]"""
SECRET = "The board sells the northern shop in March."


class House(NamedTuple):
    library: Library
    space: Space
    model: PausedModel

    @property
    def url(self) -> str:
        return self.library.server.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("data")
    async with Space() as space, PausedModel() as model:
        space.source("handbook", documents=[Document(title="Handbook", content=HANDBOOK)])
        space.source("new", documents=[Document(title="Tyres", content="Tyres are sold in pairs.")])
        space.fails("archive", Failure.STATUS_503)
        sources = {
            name: Endpoint(slug=name, url=space.url, name=name, operator=True) for name in ("handbook", "archive")
        }
        model.says("Parental leave is paid in full. [1]")
        writer = Endpoint(slug="writer", url=model.url, kind="openai", name="writer", operator=True)
        given = {"sources": sources, "models": {"writer": writer}}
        async with library(folder, models_dir, rate_limit=0, auth="api_key", **given) as opened:
            await opened.collection("policies", who="root")
            await opened.ingest("policies", text(LEAVE, filename="leave.md", title="Leave policy"), who="root")
            accepted = await opened.call(
                "POST", "/v1/ingest", data=form(("travel.pdf", pdf(*TRAVEL)), collection_id="policies"), who="root"
            )
            await opened.job(accepted.body["job_id"], who="root")
            await opened.collection("board", who="alice", default_permissions={"visibility": "private"})
            await opened.ingest(
                "board", text(SECRET, title="Minutes", permissions={"visibility": "private"}), who="alice"
            )
            yield House(opened, space, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def sign_in(page: Visit, house: House, who: str) -> None:
    await page.open()
    await page.page.get_by_label("API key").fill(house.library.secrets[who])
    await page.page.keyboard.press("Enter")
    await expect(page.page.get_by_role("button", name="Sign out")).to_be_visible()


def pdf(*pages: str) -> bytes:
    written = BytesIO()
    canvas = Canvas(written)
    for words in pages:
        canvas.drawString(72, 720, words)
        canvas.showPage()
    canvas.save()
    return written.getvalue()


async def test_a_key_signs_in_with_a_cookie_that_scripts_cannot_read_and_signs_out(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await page.open()
        await page.page.get_by_label("API key").fill("ab_wrong")
        await page.page.keyboard.press("Enter")
        await expect(page.page.locator("dialog .problem")).to_contain_text("not known")
        await page.page.get_by_label("API key").fill(house.library.secrets["bob"])
        await page.page.keyboard.press("Enter")
        await expect(page.page.get_by_label("Question")).to_be_visible()
        [cookie] = await page.page.context.cookies()
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert await page.page.evaluate("() => document.cookie") == ""
        await page.page.get_by_role("button", name="Sign out").click()
        await expect(page.page.get_by_label("API key")).to_be_visible()
        assert await page.page.context.cookies() == []


async def test_another_user_in_the_same_tab_sees_nothing_of_the_conversation(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "alice")
        await page.ask("When does the board sell the northern shop?")
        await page.answered()
        # The key of the next user replaces the cookie without a sign-out, as after a key has run out.
        await page.page.evaluate(
            """(key) => fetch("/v1/session", {
              method: "POST", body: JSON.stringify({ key }),
              headers: { "Content-Type": "application/json", "X-Anabranch-CSRF": "1" },
            })""",
            house.library.secrets["bob"],
        )
        await page.page.reload()
        await expect(page.page.get_by_label("Question")).to_be_focused()
        await expect(page.page.locator(".turn")).to_have_count(0)
        assert "northern" not in str(await page.page.evaluate("() => JSON.stringify(sessionStorage)"))


async def test_a_collection_that_one_may_not_see_is_neither_listed_nor_opened_nor_asked(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "bob")
        await page.page.goto(f"{house.url}/#/library")
        await expect(page.page.get_by_role("heading", name="policies")).to_be_visible()
        await expect(page.page.get_by_text("board")).to_have_count(0)
        await page.page.goto(f"{house.url}/#/library/board")
        await expect(page.page.locator("main")).to_contain_text("There is no collection 'board'")
        await page.page.goto(f"{house.url}/#/ask")
        await page.ask("When does the board sell the northern shop?")
        await page.answered()
        await expect(page.page.locator(".turn")).not_to_contain_text("in March")


async def test_files_are_uploaded_with_progress_and_one_that_fails_says_what_to_do(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "alice")
        await page.page.goto(f"{house.url}/#/library")
        await page.page.get_by_role("button", name="New collection").click()
        await page.page.get_by_label("Name", exact=True).fill("manuals")
        await page.page.get_by_role("button", name=re.compile("Create")).click()
        await expect(page.page.get_by_role("heading", name="manuals", level=1)).to_be_visible()
        files: list[FilePayload] = [
            {"name": "brakes.pdf", "mimeType": "application/pdf", "buffer": pdf("Brakes are checked every spring.")},
            {"name": "broken.pdf", "mimeType": "application/pdf", "buffer": b"%PDF-1.4 this is no PDF"},
        ]
        held = asyncio.Event()

        async def hold(route: Route) -> None:
            await held.wait()
            await route.continue_()

        await page.page.route("**/v1/ingest", hold)
        await page.page.locator("input[type=file]").first.set_input_files(files)
        transfers = page.page.get_by_role("region", name="Files being added")
        await expect(transfers.locator("li", has_text="brakes.pdf")).to_contain_text(
            re.compile("Upload(ing, \\d+ %|ed)")
        )
        held.set()
        await expect(transfers.locator("li", has_text="brakes.pdf")).to_contain_text("Added, 1 chunk")
        await expect(transfers.locator("li", has_text="broken.pdf")).to_contain_text("The PDF is damaged")
        await expect(transfers.locator("li", has_text="broken.pdf")).to_contain_text("Change it and add it again.")
        await expect(transfers.get_by_role("button", name="Retry broken.pdf")).to_have_count(0)
        row = page.page.locator("table tr", has_text="brakes.pdf")
        await expect(row).to_contain_text("Ready")
        await row.get_by_role("button", name="Chunks: brakes.pdf").click()
        await expect(page.page.locator("#panel")).to_contain_text("Brakes are checked every spring.")
        await page.page.keyboard.press("Escape")

        await row.get_by_role("button", name="Delete: brakes.pdf").click()
        await expect(row).to_have_count(0)
        await page.page.get_by_role("button", name="Undo").click()
        await expect(row).to_have_count(1)
        found = await house.library.good("GET", "/v1/documents?collection=manuals", who="alice")
        assert [one["title"] for one in found["documents"]] == ["brakes.pdf"]

        house.model.says("Brakes are checked every spring. [1]")
        await page.page.goto(f"{house.url}/#/ask")
        await page.ask("When are brakes checked?")
        await page.answered()
        await expect(page.page.locator(".answer-text")).to_contain_text("Brakes are checked every spring.")
        await page.page.locator("button.cite").first.click()
        await expect(page.page.locator("#panel .panel-meta")).to_contain_text("page 1 of 1")


async def test_the_question_has_the_focus_after_an_answer_is_stopped(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "bob")
        house.model.says("Parental leave", " is paid.", paused=True)
        await page.ask(QUESTION)
        await page.page.get_by_role("button", name="Stop").focus()
        await page.page.keyboard.press("Enter")
        await expect(page.page.get_by_label("Question")).to_be_focused()
        house.model.go.set()


async def test_a_collection_is_published_with_the_line_to_paste_elsewhere(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "root")
        await page.page.goto(f"{house.url}/#/library")
        await page.page.get_by_role("button", name="New collection").click()
        await page.page.get_by_label("Name", exact=True).fill("policies")
        create = page.page.get_by_role("button", name="Create")
        await create.click()
        await expect(page.page.locator("dialog .problem")).to_be_visible()
        await expect(create).to_be_focused()
        await page.page.goto(f"{house.url}/#/library/policies")
        await page.page.get_by_role("button", name="Publish").click()
        await page.page.get_by_label("Publish as").fill("shop/policies")
        await page.page.locator("dialog button[type=submit]").click()
        await expect(page.page.locator("dialog")).to_contain_text(f"shop@{house.url}/policies")
        await page.page.keyboard.press("Escape")


async def test_an_operator_adds_tests_and_removes_a_source(browser: Browser, house: House) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "root")
        await page.page.goto(f"{house.url}/#/sources")
        await page.page.get_by_role("button", name="Add a source").click()
        box = page.page.locator("dialog")
        await box.get_by_label("Name", exact=True).fill("tyres")
        await box.get_by_label("Address", exact=True).fill(house.space.url)
        await box.get_by_label("Endpoint", exact=True).fill("new")
        await box.get_by_role("button", name="Test").click()
        await expect(box).to_contain_text("Tyres are sold in pairs.")
        await box.locator("button[type=submit]").click()
        row = page.page.locator("li", has=page.page.get_by_role("heading", name="tyres"))
        await expect(row).to_contain_text("added here")
        # It is another element by now.
        await expect(page.page.get_by_role("button", name="Add a source")).to_be_focused()
        await row.get_by_role("button", name="Remove").click()
        await page.page.locator("dialog").get_by_role("button", name="Remove").click()
        await expect(row).to_have_count(0)
        await expect(page.page.get_by_role("heading", name="Sources", exact=True)).to_be_focused()


async def test_other_callers_see_the_health_of_sources_without_figures(browser: Browser, house: House) -> None:
    await house.library.ask(QUESTION, who="root", sources="all")
    for who, plots in (("alice", 0), ("root", 1)):
        async with visit(browser, house.url) as page:
            await sign_in(page, house, who)
            await page.page.goto(f"{house.url}/#/sources")
            row = page.page.locator("li", has=page.page.get_by_role("heading", name="handbook"))
            await expect(row).to_contain_text("Working" if plots else "No recent call has failed.")
            await expect(row.locator("figure")).to_have_count(2 * plots)
            await expect(page.page.get_by_text("Figures are of the last hour.")).to_have_count(plots)
            await expect(row.get_by_text("Last used")).to_have_count(plots)
            assert await page.violations_of_accessibility() == []


async def test_a_planner_step_is_followed_live_and_replayed(browser: Browser, house: House) -> None:
    steps = "/planner/sessions/orders/steps"
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "root")
        wanted = [{"key": "row_selection", "result_key": "rows", "deadline_ms": 60_000}]
        await house.library.good("POST", steps, {"plan_step_id": "refund", "expected_subagents": wanted}, who="root")
        await page.page.goto(f"{house.url}/#/streams")
        await page.page.get_by_label("Session").fill("orders")
        await page.page.get_by_label("Step", exact=True).fill("refund")
        await page.page.keyboard.press("Enter")
        await expect(page.page.locator("main")).to_contain_text(re.compile("step started", re.IGNORECASE))
        pushed = {"result_key": "rows", "status": "success", "revision": 1, "payload": {"rows": [{"id": 7}]}}
        sent = await house.library.call("POST", f"{steps}/refund/subagents/row_selection/events", pushed, who="root")
        assert sent.status == 202
        await expect(page.page.locator("main")).to_contain_text(re.compile("plan step completed", re.IGNORECASE))
        await page.page.get_by_label("Replay up to this event").fill("0")
        await expect(page.page.locator("main")).to_contain_text(re.compile("Sequence 1 of"))


async def test_activity_shows_questions_and_an_operator_creates_and_revokes_keys(
    browser: Browser, house: House
) -> None:
    async with visit(browser, house.url) as page:
        await sign_in(page, house, "root")
        await page.ask("Is parental leave paid?")
        await page.answered()
        await page.page.goto(f"{house.url}/#/activity")
        await expect(page.page.locator("main table")).to_contain_text("Is parental leave paid?")
        await page.page.get_by_role("tab", name="Keys").click()
        await page.page.get_by_role("button", name="New key").click()
        await page.page.get_by_label("User").fill("dora")
        await page.page.locator("dialog button[type=submit]").click()
        key = await page.page.get_by_label("Key", exact=True).inner_text()
        house.library.secrets["dora"] = key
        assert (await house.library.call("GET", "/v1/collections", who="dora")).status == 200
        await page.page.get_by_role("button", name="Done").click()
        row = page.page.locator("tr", has_text="dora")
        await row.get_by_role("button", name="Revoke").click()
        await page.page.locator("dialog").get_by_role("button", name="Revoke").click()
        await expect(row).to_contain_text("Revoked")
        await expect(page.page.get_by_role("heading", name="Activity")).to_be_focused()
        assert (await house.library.call("GET", "/v1/collections", who="dora")).status == 401


@pytest.mark.parametrize("theme", ["light", "dark", "narrow"])
async def test_axe_finds_no_violation_on_any_screen(browser: Browser, house: House, theme: str) -> None:
    options = {"light": {}, "dark": DARK, "narrow": NARROW}[theme]
    async with visit(browser, house.url, **options) as page:
        await sign_in(page, house, "root")
        await pictured(page, "welcome", theme)
        await finished_step(house, theme)
        house.model.says(WRITTEN)
        await page.ask(QUESTION)
        await page.answered()
        verdicts = await page.page.locator(".verdict").evaluate_all("(all) => all.map((one) => one.className)")
        assert verdicts == [f"verdict {one}" for one in ("partly", "supported", "contradicted", "unsupported")]
        await expect(page.page.locator("button.cite.unproven")).to_have_text(["1", "2"])
        await pictured(page, "ask", theme)
        await page.page.locator(".sentence.supported").first.click()
        await expect(page.page.locator("#panel mark").first).to_be_visible()
        await pictured(page, "source", theme)
        await page.page.get_by_role("button", name="Close").click()
        await page.page.locator("details.run summary").click()
        await page.page.get_by_role("button", name="Explain").click()
        await expect(page.page.locator("#panel .explained").first).to_be_visible()
        await pictured(page, "explain", theme)
        for screen, shown in {
            "library": "policies",
            "library/policies": "Leave policy",
            "sources": "Remote sources",
            "streams": "What is a planner step?",
            f"streams/leave/{theme}": "All subagents succeeded.",
            "activity": QUESTION,
            "activity/keys": "You use this one",
        }.items():
            await page.page.goto(f"{house.url}/#/{screen}")
            await expect(page.page.locator("main").get_by_text(shown).first).to_be_visible()
            name = "step" if "leave" in screen else screen.replace("/", "-")
            await pictured(page, name, theme)
        await page.page.goto(f"{house.url}/#/sources")
        await page.page.get_by_role("button", name="Add a source").click()
        await pictured(page, "add-source", theme)


async def finished_step(house: House, name: str) -> None:
    """A planner step whose two subagents have delivered."""
    steps = "/planner/sessions/leave/steps"
    wanted = [
        {"key": "documentation", "result_key": "policy", "input": {"question": QUESTION}},
        {"key": "row_selection", "result_key": "balances", "deadline_ms": 60_000},
    ]
    await house.library.good("POST", steps, {"plan_step_id": name, "expected_subagents": wanted}, who="root")
    address = f"{steps}/{name}/subagents/row_selection/events"
    for status, revision, rows in (
        ("partial", 1, [{"user": "alice", "days": 12}]),
        ("success", 2, [{"user": "alice", "days": 12}, {"user": "bob", "days": 30}]),
    ):
        pushed = {"result_key": "balances", "status": status, "revision": revision, "payload": {"rows": rows}}
        assert (await house.library.call("POST", address, pushed, who="root")).status == 202


async def pictured(page: Visit, name: str, theme: str) -> None:
    """Check the screen, and keep its picture for the documentation where that is wanted."""
    # The dark theme differs in its colors, and the narrow layout in the rest.
    assert await page.violations_of_accessibility(colors=theme != "narrow", others=theme != "dark") == []
    assert await page.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
    if PICTURES:
        await page.page.screenshot(path=Path(PICTURES) / f"{name}-{theme}.png")
