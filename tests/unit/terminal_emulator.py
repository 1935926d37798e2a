"""A terminal that takes nothing but text: what it would do on anything else is recorded.

It is the parser of ECMA-48 and DEC's terminals in its states: text, after ESC, in a control sequence, in a string (OSC,
DCS, SOS, PM, APC). It knows C1 as single characters, and as ESC with a letter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TEXT, ESCAPE, SEQUENCE, STRING = "text", "escape", "sequence", "string"
_STRING_C1 = {"\x90", "\x98", "\x9d", "\x9e", "\x9f"}
_STRING_7BIT = set("PX]^_")


@dataclass
class Terminal:
    """`obeyed` has all that it did besides showing characters, tabs and new lines."""

    state: str = TEXT
    shown: str = ""
    obeyed: list[str] = field(default_factory=list)

    def feed(self, text: str) -> None:
        for char in text:
            self._take(char)

    def _take(self, char: str) -> None:
        if char == "\x1b":
            self.state = ESCAPE
            self.obeyed.append("ESC")
        elif self.state == TEXT:
            self._take_text(char)
        elif self.state == ESCAPE:
            self.state = SEQUENCE if char == "[" else STRING if char in _STRING_7BIT else TEXT
        elif self.state == SEQUENCE:
            self.state = TEXT if "@" <= char <= "~" else SEQUENCE
        elif char in "\x07\x9c":
            self.state = TEXT

    def _take_text(self, char: str) -> None:
        if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"):
            self.shown += char
            return
        self.obeyed.append(repr(char))
        if char == "\x9b":
            self.state = SEQUENCE
        elif char in _STRING_C1:
            self.state = STRING
