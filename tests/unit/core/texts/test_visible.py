"""Text of others neither steers a terminal nor hides in it; all else of it is shown as it is."""

from __future__ import annotations

import logging
import unicodedata
from typing import TYPE_CHECKING

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from llmnode.core.texts.log_lines import LogLines
from llmnode.core.texts.visible import Visible, escaped, printable, quoted, visible
from unit.terminal_emulator import TEXT, Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY = [chr(code) for code in range(0x110000)]
# The package `regex` has a newer Unicode Character Database than Python, and no list of ours.
IGNORABLE = frozenset(regex.findall(r"\p{Default_Ignorable_Code_Point}", "".join(EVERY)))
BIDI = frozenset(regex.findall(r"\p{Bidi_Control}", "".join(EVERY)))
NEVER = frozenset(char for char in EVERY if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")) - {"\n", "\t"}

HOSTILE = [
    "\x1b]0;OWNED\x07",
    "\x1b[31mred\x1b[0m",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1b[2J\x1b[H",
    "\x1bP+q544e\x1b\\",
    "\x9b31m",
    "\x90q\x9c",
    "\r\x08\x08\x0b\x0c",
    "a\u202egnp.exe",
    "\u2066a\u2069",
    "\u200e\u200f\u061c",
    "\u2028llmnode: ready\u2029",
    "\x00\x7f\x85",
    "pay\u200dpal",
    "\u3164\u115f\u1160\uffa0",
    "".join(chr(0xE0000 + ord(char)) for char in "hidden"),
    "a" + "".join(map(chr, range(0xE0100, 0xE0110))),
    "\ufeff\xad\u034f\u2060",
]
NEEDED = [
    "👨‍👩‍👧‍👦 ❤️‍🔥 🏳️‍🌈 👩🏽‍🚀 🙂‍↔️ 🐦‍⬛ ⛹🏻‍♀️",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🏴󠁧󠁢󠁷󠁬󠁳󠁿 🇫🇷 1️⃣ #️⃣ ©️",
    "क्‍ष ශ්‍රී മലയാളം‌ می‌خواهم ভাষা",
    "ភាសា\u200bខ្មែរ",
    "葛\U000e0100 ᠭ᠋ ≨\ufe00",
    "עברית العربية ١٢٣ \u06dd٣ e\u0301\u0323 한국어 日本語 \xa0\u3000",
    "a\n\tb\n",
]
ANY_TEXT = st.one_of(
    st.text(st.characters(codec=None, categories=("Cc", "Cf", "Cs", "Mn", "Zl", "Zp", "So", "Lo", "Ll", "Nd", "Zs"))),
    st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")),
    st.binary().map(lambda data: data.decode("latin-1")),
    st.lists(st.sampled_from([*HOSTILE, *NEEDED, *"\x1b[]0;m\x9b\u200d\ufe0f👨क"])).map("".join),
)


def test_the_emulator_sees_what_steers_a_terminal() -> None:
    steering = [text for text in HOSTILE if any(unicodedata.category(char) == "Cc" for char in text)]
    assert len(steering) > 8
    for text in steering:
        terminal = Terminal()
        terminal.feed(text)
        assert terminal.obeyed, repr(text)


@given(st.lists(ANY_TEXT))
@example(["\x1b", "[31m", "\x1b]52;c;", "x\x07"])
@example(["👨", "\u200d", "👩"])
def test_whatever_comes_in_pieces_a_terminal_stays_in_text_and_its_cursor_goes_on(pieces: Sequence[str]) -> None:
    screen, terminal = Visible(), Terminal()
    shown = ""
    for piece in pieces:
        shown += screen.show(piece)
        terminal.feed(shown[len(terminal.shown) :])
        assert (terminal.state, terminal.obeyed) == (TEXT, [])
    assert terminal.shown == shown
    assert shown == visible("".join(pieces)), "where it is cut makes no difference"
    assert visible(shown) == shown, "what is shown is shown as it is"
    for before, char in zip(f" {shown}", shown, strict=False):
        assert char not in NEVER | BIDI
        assert not (char in IGNORABLE and before.isascii() and before not in "0123456789#*")


@pytest.mark.parametrize("text", NEEDED)
def test_what_scripts_and_emoji_need_stays(text: str) -> None:
    assert visible(text) == text
    screen = Visible()
    assert "".join(map(screen.show, text)) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_not_shown_is_escaped_and_nothing_else_changes(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable() and shown != text
    gone = {char for char in text if char not in shown}
    assert shown == "".join(escaped(char) if char in gone else char for char in text)


def test_every_character_alone_is_shown_or_escaped_by_its_unicode_properties() -> None:
    hidden = IGNORABLE | NEVER | {"\ufff9", "\ufffa", "\ufffb"}
    assert len(BIDI) == 12 and len(hidden) > 6000
    for char in EVERY:
        assert (visible(char) == char) == (char not in hidden), hex(ord(char))
    assert visible("".join(sorted(hidden - BIDI - {"\ufe0e", "\ufe0f"}))).isascii()


def test_invisible_characters_carry_no_message() -> None:
    """Each needs a visible one before it that it belongs to."""
    for char in IGNORABLE:
        for base in ("a", "1", "é", "क", "👨", "🏴"):
            assert sum(each in IGNORABLE for each in visible(base + 3 * char)) <= 1


def test_a_line_is_one_line_whatever_is_in_it() -> None:
    assert printable("a\nllmnode: ready\t\x1b[31m\u2028\udcff") == "a\\nllmnode: ready\\t\\x1b[31m\\u2028\\udcff"
    assert len(printable("x" * 10**6)) < 3000
    assert quoted("a\nllmnode: b\r\n") == "  | a\n  | llmnode: b\\r"


@given(ANY_TEXT)
def test_a_record_of_the_log_is_a_line_and_its_traceback_stands_apart(words: str) -> None:
    error = ValueError(f"{words}\nllmnode: ready")
    try:
        raise error
    except ValueError:
        record = logging.LogRecord("llmnode", logging.ERROR, "", 1, "peer said %s", (words,), (ValueError, error, None))
        record.exc_text = "as another handler\nleft it"
    line, *trace = LogLines("%(message)s").format(record).split("\n")
    assert line == printable(f"peer said {words}")
    assert trace and all(each.startswith("  | ") for each in trace)
    terminal = Terminal()
    terminal.feed("\n".join([line, *trace]))
    assert terminal.obeyed == []
