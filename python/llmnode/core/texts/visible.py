r"""Makes text of others harmless to a terminal: nothing in it steers the cursor, and nothing in it is invisible.

Models, peers and files choose such text. A code point that is not to be shown is written as its escape (`\x1b`,
`\u202e`), so that the reader sees that it was there. All others come through as they are. Two things decide:

- The general category (Unicode Standard, chapter 4.5; ECMA-48 for the effect of C0 and C1). Control characters (Cc),
  surrogates (Cs) and the separators of lines and paragraphs (Zl, Zp) are escaped. Newline and tab stay.
- The property Default_Ignorable_Code_Point (`DerivedCoreProperties.txt` of the Unicode Character Database): code points
  without a glyph. Among them are all bidirectional controls (UAX #9: embeddings, overrides, isolates and marks), tags,
  fillers, the soft hyphen and the byte order mark. They are escaped, and so are the interlinear annotation characters.

Some invisible code points are part of how scripts and emoji are written. Each stays where its predecessor gives it a
meaning, and nowhere else, so a run of them cannot carry a message:

- Joiners (U+200C, U+200D; UAX #31, 2.3) stay after a letter without case, a mark or a symbol.
- The zero width space (U+200B) parts words in Khmer, Thai, Lao and Burmese. It stays after such a letter or a mark.
- Variation selectors stay after a visible character that is not of ASCII. The two that choose text or emoji stay after
  the characters of keycaps as well (UTS #51).
- Tags stay in the flags of England, Scotland and Wales, which are the sequences that UTS #51 recommends.

Not covered: letters that look alike, and letters from right to left, which terminals may show in another order.
"""

from __future__ import annotations

import io
import re
import unicodedata
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_SHOWN = 2000
"""The most characters of one line of ours: an error may quote what a user gave."""

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_ANNOTATIONS = "\ufff9-\ufffb"
_SELECTORS = "\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_IGNORABLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Default_Ignorable_Code_Point. It is reserved for all of these ranges, so later versions of Unicode add no other."""
_SUSPECT = re.compile(f"[{_CONTROLS}{_ANNOTATIONS}{_IGNORABLE}]")
_SELECTOR = re.compile(f"[{_SELECTORS}]")

_JOINERS, _ZERO_WIDTH_SPACE = "\u200c\u200d", "\u200b"
_LETTERS = frozenset({"Lo", "Lm", "Mn", "Mc"})
"""Letters without case, and marks: of the scripts that need joiners. Emoji are symbols."""
_SYMBOLS = frozenset({"So", "Sk", "Cn"})
"""With what is not assigned: emoji of a later version of Unicode than Python knows."""
_KEYCAPS, _EMOJI_SELECTORS = frozenset("0123456789#*"), frozenset("\ufe0e\ufe0f")
_FLAG = "\U0001f3f4"
_FLAGS = [
    _FLAG + "".join(chr(0xE0000 + ord(letter)) for letter in region) + "\U000e007f"
    for region in ("gbeng", "gbsct", "gbwls")
]
_REMEMBERED = max(map(len, _FLAGS))


class Visible:
    """Shows one text that comes in pieces. A piece may end anywhere, also within an escape sequence or a flag."""

    def __init__(self) -> None:
        self._before = ""
        """The end of what was shown."""

    def show(self, piece: str) -> str:
        """The piece as it may be written. Showing its result again changes nothing."""
        return "".join(self._parts(piece))

    def _parts(self, piece: str) -> Iterator[str]:
        at = 0
        for found in _SUSPECT.finditer(piece):
            yield self._shown(piece[at : found.start()])
            yield self._shown(found[0] if _stays(found[0], self._before) else escaped(found[0]))
            at = found.end()
        yield self._shown(piece[at:])

    def _shown(self, text: str) -> str:
        self._before = (self._before + text[-_REMEMBERED:])[-_REMEMBERED:]
        return text


class VisibleStream(io.TextIOBase):
    """Writes to `stream` what is visible of a text. Everything that is not about writing is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._visible = Visible()

    def write(self, text: str) -> int:
        self._stream.write(self._visible.show(text))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def visible(text: str) -> str:
    """A whole text, of one line or several."""
    return Visible().show(text)


def printable(text: str) -> str:
    """One line, not too long. A line end within it is shown, and does not begin a line that looks like ours."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 2 :]}"
    return visible(shown).replace("\n", "\\n").replace("\t", "\\t")


def quoted(text: str) -> str:
    """Several lines, as those of a traceback: each begins with a bar, so that none looks like one of ours."""
    return "\n".join(f"  | {printable(line)}" for line in text.rstrip("\n").split("\n"))


def escaped(char: str) -> str:
    """The escape that Python writes for it."""
    return char.encode("unicode_escape").decode()


def _stays(char: str, before: str) -> bool:
    last = before[-1:]
    if last <= "\x7f":
        return last in _KEYCAPS and char in _EMOJI_SELECTORS
    kind = unicodedata.category(last)
    if char in _JOINERS:
        return kind in _LETTERS or kind in _SYMBOLS
    if char == _ZERO_WIDTH_SPACE:
        return kind in _LETTERS
    if _SELECTOR.fullmatch(char):
        return kind[0] not in "CZ" and _SUSPECT.fullmatch(last) is None
    begun = before[before.rfind(_FLAG) :] + char
    return any(flag.startswith(begun) for flag in _FLAGS)
