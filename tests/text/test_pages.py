"""A passage as the evidence model reads it."""

from anabranch.text.pages import page, titled

TABLE = """\
Intro text of the section.

## Options

| Option | Default |
| --- | --- |
| `--port` | 8001 |
| `--host` | localhost |

## Limits

There are no limits.
"""


def test_the_title_ends_with_the_innermost_headings() -> None:
    assert titled("Guide", ()) == "Guide"
    assert titled("Guide", ("Guide", "Settings")) == "Guide > Settings"
    assert titled("Guide", ("Guide", "Settings", "Server", "Port")) == "Guide > Server > Port"


def test_a_heading_and_a_header_row_are_read_once_where_they_begin() -> None:
    read = page("Guide", ("Guide",), TABLE)
    assert [(unit.before, unit.text) for unit in read.units] == [
        ("", "Intro text of the section."),
        ("Options\n| Option | Default |", "| `--port` | 8001 |"),
        ("", "| `--host` | localhost |"),
        ("Limits", "There are no limits."),
    ]


def test_a_heading_that_the_title_has_is_not_read_again() -> None:
    read = page("Guide", ("Guide", "Limits"), "## Limits\n\nThere are no limits.\n")
    assert [(unit.before, unit.text) for unit in read.units] == [("", "There are no limits.")]
