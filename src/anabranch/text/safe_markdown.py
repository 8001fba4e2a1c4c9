"""Answers as Markdown that is safe to render: HTML is escaped, and links and images lead only to addresses of sources.
Works on a stream: only what may be the beginning of a link, of HTML or of code is held back."""

import html
import re
from collections.abc import Callable

# No link, tag or inline code is longer; what is, is text.
MAX_HELD = 4_000
MAX_REPORTED = 100
MAX_LOOKUPS = 200
MAX_ADDRESS = 2_000
# Characters of the sources in which addresses are looked for, and those that all lookups of an answer read. A place
# with another address counts as so many characters as are read in its time.
MAX_SOURCES, MAX_LOOKED_AT, ELSEWHERE = 1_000_000, 25_000_000, 100

URL_START = r"(?:https?://|ftp://|www\.)"
SPECIAL = re.compile(rf"[`~<\]\\\n&]|{URL_START}", re.IGNORECASE)
MAYBE_URL = re.compile(r"(?<![A-Za-z])(?:h|ht|htt|https?:?/?|f|ft|ftp:?/?|w{1,3})$", re.IGNORECASE)
URL = re.compile(rf"{URL_START}[^\s<>`\[\]\"\\|]*", re.IGNORECASE)
# What some renderers take for the rest of an address.
URL_REST = re.compile(r"[^\s<]*")
NO_REST = re.compile(r"[^\w/%?&=#]*(?:$|\]\()")
TRAILING = "?!.,:;*_~'\")}"
# A character by its number or name. Renderers decode it before they look for addresses.
REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
MAYBE_REFERENCE = re.compile(r"&(?:#(?:[0-9]{0,7}|[xX][0-9a-fA-F]{0,6})|[A-Za-z][A-Za-z0-9]{0,31})?$")
OF_ADDRESS = re.compile(r"[A-Za-z0-9:/.@?=#%~+_-]")
TAG_START = re.compile(r"<[A-Za-z/!?]")
AUTOLINK = re.compile(r"<([A-Za-z][A-Za-z0-9+.-]{1,31}:[^\s<>]*)>")
MAYBE_AUTOLINK = re.compile(r"<(?:[A-Za-z][A-Za-z0-9+.-]{0,31}(?::[^\s<>]*)?)?$")
LINK = re.compile(
    r"\]\([ \t]*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))"
    r"(?:[ \t]+(?:\"[^\"\n]*\"|'[^'\n]*'|\([^()\n]*\)))?[ \t]*\)"
)
NO_LINK = re.compile(r"\]\([ \t]*[^\s<()\\]+[ \t]+[^\s\"'()]|\][^(:]")
# A line break within a link: what follows may belong to a quotation or a list.
BROKEN_LINK = re.compile(r"\]\([^\n]*\n")
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|[/\\]|www\.", re.IGNORECASE)
SCHEMES = ("http", "https", "ftp", "mailto")
# Before and after an address in a source: no character that would make it another address.
BEFORE = re.compile(r"(?<![\w/.%?&=#~+@:-])")
AFTER = re.compile(r"/?(?![\w/%?&=#~+@$-]|[.,;:!][\w/])")

FENCE = re.compile(r"( *)(`{3,}(?=[^`|\n]*(?:\n|$))|~{3,}(?=[^|\n]*(?:\n|$)))[^\n]*")
MAYBE_FENCE = re.compile(r" *(?:`*|~*)$")
BLOCK_PREFIX = re.compile(r"[\s>*+\-\d.)]*")
RISKY_IN_TABLE = re.compile(rf"<|\]\(|\]:|{URL_START}", re.IGNORECASE)


class SafeMarkdown:
    """One answer. `sources` gives the text with the addresses that links may have; it is called for the first link."""

    def __init__(self, sources: Callable[[], str]) -> None:
        self._sources = sources
        self._haystack: str | None = None
        self._left = MAX_LOOKED_AT
        self._known: dict[str, bool] = {}
        self._removed: dict[str, None] = {}
        self._held = ""
        # The line that is being written, as far as it has come.
        self._line = ""
        # The fence that code is in: its character and length. `_mid_line`: the line of code is not a closing fence.
        self._fence: tuple[str, int] | None = None
        self._mid_line = False
        self._after_return = False

    @property
    def removed(self) -> tuple[str, ...]:
        """The addresses that were removed, each once."""
        return tuple(self._removed)[:MAX_REPORTED]

    def feed(self, text: str) -> str:
        """What can be shown now. A long text is read in parts: each step copies what is held."""
        text = self._with_line_feeds(text)
        return "".join(self._fed(text[at : at + MAX_HELD]) for at in range(0, len(text), MAX_HELD))

    def end(self) -> str:
        """The rest, as if the text ended here. Another part may follow."""
        return self._scanned(final=True)

    def accepts(self, part: str) -> bool:
        """Whether a further part can be shown as it is, by itself, behind those that were accepted before. If not, it
        does not count as a part."""
        before = self._line, self._fence, self._mid_line, self._after_return
        if self.feed(part) + self.end() == part:
            return True
        self._line, self._fence, self._mid_line, self._after_return = before
        return False

    def _with_line_feeds(self, text: str) -> str:
        """A carriage return ends a line too, for renderers: alone, or with the line feed that follows it."""
        if self._after_return and text:
            text, self._after_return = text.removeprefix("\n"), False
        if "\r" not in text:
            return text
        self._after_return = text.endswith("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _fed(self, part: str) -> str:
        self._held += part
        return self._scanned(final=False)

    def _scanned(self, *, final: bool) -> str:
        out: list[str] = []
        while self._held:
            taken, shown = self._code(final=final) if self._fence else self._next(final=final)
            if not taken:
                break
            out.append(shown)
            self._held = self._held[taken:]
            self._line = (self._line + shown).rpartition("\n")[2][-MAX_HELD:]
        return "".join(out)

    def _next(self, *, final: bool) -> tuple[int, str]:
        """How much of the held text is decided, and what is shown for it; nothing if that depends on what follows."""
        text = self._held
        if not self._line and text[0] in " `~":
            taken, shown = self._fenced(final=final)
            if taken is not None:
                return taken, shown
        found = SPECIAL.search(text)
        if found is None:
            maybe = None if final else MAYBE_URL.search(text)
            end = maybe.start() if maybe else len(text)
            return end, text[:end]
        if found.start():
            return found.start(), text[: found.start()]
        match text[0]:
            case "\n":
                return 1, "\n"
            case "\\":
                return self._backslash(final=final)
            case "`":
                return self._backticks(final=final)
            case "~":
                return self._tildes(final=final)
            case "<":
                return self._angle(final=final)
            case "&":
                return self._reference(final=final)
            case "]":
                return self._bracket(final=final)
            case _:
                return self._url(final=final)

    def _undecided(self, *, final: bool) -> bool:
        return not final and len(self._held) < MAX_HELD

    def _fenced(self, *, final: bool) -> tuple[int | None, str]:
        """At the beginning of a line: the fence of a code block, or a whole indented one. None if there is none."""
        text = self._held
        if not final and MAYBE_FENCE.match(text) and len(text) < MAX_HELD:
            return 0, ""
        found = FENCE.match(text)
        if found is not None and "\n" not in text and self._undecided(final=final):
            return 0, ""
        if found is None or ("\n" not in text and not final):
            return None, ""
        indent, fence = len(found[1]), found[2]
        if not indent:
            self._fence, self._mid_line = (fence[0], len(fence)), False
            return min(found.end() + 1, len(text)), text[: found.end() + 1]
        end = self._indented(found.end() + 1, indent, fence, final=final)
        if end is None and self._undecided(final=final):
            return 0, ""
        return (end, text[:end]) if end else (None, "")

    def _indented(self, at: int, indent: int, fence: str, *, final: bool) -> int | None:
        """The end of a code block that is certainly one, whatever list it belongs to: 0 if it is not, None if that
        depends on what follows."""
        while (newline := self._held.find("\n", at)) >= 0:
            line = self._held[at:newline]
            at = newline + 1
            if line.rstrip() == " " * indent + fence:
                return at
            is_blank = not line.strip()
            if (is_blank and indent > 3) or (not is_blank and not line.startswith(" " * indent)):
                return 0
            if line.lstrip().startswith(("```", "~~~")):
                return 0
        closed = final and self._held[at:].rstrip() == " " * indent + fence
        return len(self._held) if closed else None

    def _code(self, *, final: bool) -> tuple[int, str]:
        """A line of a code block, or the part of it that has come."""
        assert self._fence is not None, "only in a code block"
        text, (character, length) = self._held, self._fence
        newline = text.find("\n")
        line = text if newline < 0 else text[:newline]
        closing = not self._mid_line and re.fullmatch(rf" {{0,3}}{re.escape(character)}{{{length},}}[ \t]*", line)
        if newline < 0 and not final and re.fullmatch(r"[ `~\t]*", line) and not self._mid_line:
            return 0, ""
        if closing:
            self._fence = None
        self._mid_line = newline < 0
        end = len(text) if newline < 0 else newline + 1
        return end, text[:end]

    def _backslash(self, *, final: bool) -> tuple[int, str]:
        if len(self._held) == 1:
            return (1, "\\") if final else (0, "")
        following = self._held[1]
        if following == "<":
            return 1, ""  # an escaped bracket is escaped as HTML instead
        if following in "/.:@":
            return 1, "\\\\"  # without the backslash, the rest could be an address
        return (2, f"\\{following}") if following in "\\`[]()*_#!~>|" else (1, "\\")

    def _backticks(self, *, final: bool) -> tuple[int, str]:
        """Inline code is shown as it is. It ends on its line: a line break may end its paragraph."""
        text = self._held
        length = len(text) - len(text.lstrip("`"))
        if length == len(text) and self._undecided(final=final):
            return 0, ""
        escaped = "\\`" * length
        if length >= 3 and BLOCK_PREFIX.fullmatch(self._line):
            return length, escaped
        newline = text.find("\n")
        line = text if newline < 0 else text[:newline]
        closing = re.search(rf"(?<!`)`{{{length}}}(?!`)", line[length:])
        if closing is None or (newline < 0 and length + closing.end() == len(text) and not final):
            if newline < 0 and self._undecided(final=final):
                return 0, ""
            if closing is None:
                return length, escaped
        code = text[: length + closing.end()]
        if "|" in code and RISKY_IN_TABLE.search(code):
            return length, escaped  # cells of a table end code
        return len(code), self._apart(code)

    def _tildes(self, *, final: bool) -> tuple[int, str]:
        """They would begin code for some renderers, or in some lists and quotations."""
        length = len(self._held) - len(self._held.lstrip("~"))
        if length == len(self._held) and self._undecided(final=final):
            return 0, ""
        is_fence = length >= 3 and BLOCK_PREFIX.fullmatch(self._line)
        return length, ("\\~" if is_fence else "~") * length

    def _angle(self, *, final: bool) -> tuple[int, str]:
        text = self._held
        if MAYBE_AUTOLINK.match(text) and self._undecided(final=final):
            return 0, ""
        found = AUTOLINK.match(text)
        if found is not None and found[1].lower().startswith(("http:", "https:", "ftp:", "mailto:")):
            shown = found[0] if self._allowed(found[1]) else self._plain(found[1])
            return found.end(), shown
        return 1, "&lt;" if TAG_START.match(text) else "<"

    def _reference(self, *, final: bool) -> tuple[int, str]:
        if not final and MAYBE_REFERENCE.match(self._held):
            return 0, ""
        found = REFERENCE.match(self._held)
        hidden = found is not None and OF_ADDRESS.fullmatch(html.unescape(found[0])) is not None
        return 1, "&amp;" if hidden else "&"

    def _bracket(self, *, final: bool) -> tuple[int, str]:
        """The end of a link's text: `](address)`, or `]: address`, which defines a reference."""
        text = self._held
        if NO_LINK.match(text):
            return 1, "]"
        link = LINK.match(text)
        if link is not None:
            return self._link(link)
        if text[1:2] == ":":
            return 2, "] :"  # with a space before the colon it defines no reference
        if self._undecided(final=final) and not BROKEN_LINK.match(text):
            return 0, ""
        return (2, f"] {text[1]}") if text[1:] else (1, "]")

    def _link(self, link: re.Match[str]) -> tuple[int, str]:
        address = link[1] if link[1] is not None else link[2]
        if self._allowed(address):
            return link.end(), f"](<{address}>)" if " " in address else f"]({address})"
        # An address without a scheme may be no address: `f[0](x)`.
        return (link.end(), "]") if ABSOLUTE.match(html.unescape(address)) else (2, "] (")

    def _url(self, *, final: bool) -> tuple[int, str]:
        text = self._held
        found = URL.match(text)
        assert found is not None, "it begins like one"
        rest = URL_REST.match(text, 0)
        if rest is not None and rest.end() == len(text) and self._undecided(final=final):
            return 0, ""
        if self._line[-1:].isascii() and self._line[-1:].isalpha():
            return 1, text[0]
        address = found[0]
        while address[-1:] in TRAILING and not (address[-1] == ")" and address.count(")") <= address.count("(")):
            address = address[:-1]
        rest_of_it = text[len(address) : rest.end() if rest else len(text)]
        if self._allowed(address, report=False) and NO_REST.match(rest_of_it):
            return len(address), address
        if len(address) <= 4:  # `www.` alone
            return len(found[0]), found[0]
        self._report(address)
        return len(address), self._plain(address)

    def _plain(self, address: str) -> str:
        """An address as code, which no renderer makes a link."""
        return self._apart(f"`{address.replace('`', '')}`")

    def _apart(self, code: str) -> str:
        """Code directly behind other code, or behind a backslash, would be none."""
        return f" {code}" if self._line.endswith(("`", "\\")) else code

    def _allowed(self, address: str, *, report: bool = True) -> bool:
        """Whether a source has the address."""
        address = html.unescape(address).strip()
        known = self._known.get(address)
        if known is None:
            known = len(self._known) < MAX_LOOKUPS and self._is_known(address)
            self._known[address] = known
        if not known and report:
            self._report(address)
        return known

    def _is_known(self, address: str) -> bool:
        scheme = SCHEME.match(address)
        if not address or len(address) > MAX_ADDRESS or any(one in address for one in "`\\\n<>"):
            return False
        if scheme is not None and scheme[1].lower() not in SCHEMES:
            return False
        if self._haystack is None:
            text = self._sources()[:MAX_SOURCES]
            self._haystack = f"{text}\n{html.unescape(text)}" if "&amp;" in text else text
        written = address.removeprefix("mailto:").rstrip("/")
        return bool(written) and self._occurs(written, self._haystack)

    def _occurs(self, written: str, text: str) -> bool:
        """Whether a text has the address by itself, not within another one; False if too much was read."""
        begin = 0
        while self._left > 0:
            at = text.find(written, begin)
            self._left -= (at if at >= 0 else len(text)) - begin + ELSEWHERE
            if at < 0:
                return False
            if BEFORE.match(text, at) and AFTER.match(text, at + len(written)):
                return True
            begin = at + 1
        return False

    def _report(self, address: str) -> None:
        address = html.unescape(address).strip()[:MAX_ADDRESS]
        if address and len(self._removed) < MAX_REPORTED:
            self._removed[address] = None
