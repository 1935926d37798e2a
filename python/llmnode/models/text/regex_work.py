"""How long a regex may look at a text before it gives up: a limit that is read from the regex alone.

A regex engine that goes back and tries otherwise, as that of tokenizers does, takes hours or years for some regexes and
texts. This file counts the ways in which a regex can try. It knows the syntax that tokenizers of models are written in,
and refuses the rest. It does not match.

A regex that goes back over words alone, or spaces alone, as those of models do, is quick in most texts, as words are
short. One that goes back over whole texts is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

TEXT = 4096
"""The length of the text in `Work.ways`: if they grow with the length, not its square, they are a few times this."""
_LETTERS = 4096
_DEPTH = 16
_REPEATED = 64
"""The most repetitions of a group that has several ways."""

_KNOWN = {
    " ?[^(\\s|[.,!?…。，、।۔،])]+",  # of BLOOM: a set in another
}
_GROUP = re.compile(r"\((\?:|\?i:|\?>|\?=|\?!|\?<=|\?<!|(?!\?))")
_LOOKS = ("?=", "?!", "?<=", "?<!")
_INTERVAL = re.compile(r"\{(\d{1,4})(?:(,)(\d{1,4})?)?\}")
_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w+\}|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[sSdDwWhHrntfv]|[^\w\s])")
_NARROW = re.compile(r"\\(?:p\{(?:[LMNPS][a-z]?|Han)\}|[sSdwhrntfv]|[^\w\s])")
"""Escapes that match no space, or nothing else."""
_SPACES = {*(r"\s", r"\r", r"\n", r"\t", r"\f", r"\v"), "\xa0", "\u3000"}
_ANCHOR = re.compile(r"\\[bBAzZ]|[\^$]")


class RegexTooHard(Exception):
    """The regex may take too long, or nobody can tell. Its words go on after "a regex"."""


@dataclass(frozen=True, slots=True)
class Work:
    ways: int
    """The most ways that the regex can try at one place of a text before it gives up."""
    shortest: int
    """The fewest characters that a match has."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A character or place, a group of branches, or one of them repeated."""

    branches: tuple[tuple[_Part, ...], ...] = ()
    """None for a single character."""
    is_broad: bool = False
    """Whether it is a character that may be a space or another one."""
    takes: bool = True
    """Whether its match is a part of the text: not that of a place, or of what is only looked at."""
    least: int = 1
    most: int | None = 1


def work_of(regex: str) -> Work:
    """Raises RegexTooHard if no limit is known."""
    if regex in _KNOWN:
        return Work(1, 1)
    if len(regex) > _LETTERS:
        raise RegexTooHard(f"of {len(regex)} characters")
    reader = _Reader(regex)
    branches = reader.branches(0)
    if reader.at < len(regex):
        raise reader.refusal()
    return Work(sum(_ways(branch, fails=False) for branch in branches), _shortest(_Part(branches)))


def _ways(parts: tuple[_Part, ...], *, fails: bool) -> int:
    """How a sequence of parts can match; with `fails` also the later ones, as what comes after it may not match.

    Up to the last part that can fail, all are tried again for each way of those before. The parts after that are not.
    """
    ways, tried, once = 1, 0, 0
    for part in reversed(parts):
        may_fail = fails or part.least > 0
        if may_fail:
            ways *= _ways_of_part(part, fails=fails)
            tried += 1
        else:
            once += _ways_of_part(part, fails=False)
        fails = may_fail
    return ways * max(1, tried) + once


def _ways_of_part(part: _Part, *, fails: bool) -> int:
    if not part.branches:
        if fails and part.most is None and part.is_broad:
            raise RegexTooHard("that goes back over words and spaces")
        if not fails or part.least == part.most:
            return max(1, part.least)
        return TEXT + part.least if part.most is None else part.most + 1
    if part.most == 1:  # what is only looked at is done again each time: all of it counts
        return 1 - part.least + sum(_ways(branch, fails=fails or not part.takes) for branch in part.branches)
    if part.most is None and part.least <= 1 and not fails:  # a repetition that fails ends it, and none is tried again
        return sum(_ways(branch, fails=False) for branch in part.branches)
    if part.most is None and _is_fixed(part):
        return TEXT + part.least
    if part.most is None or part.most > _REPEATED:
        raise RegexTooHard("that repeats a group, and may try each repetition in several ways")
    once = sum(_ways(branch, fails=True) for branch in part.branches)
    again: int = min(once, TEXT) ** part.most
    return max(part.most, again)


def _is_fixed(part: _Part) -> bool:
    """Whether a group is one character a fixed number of times: it matches in one way."""
    match part.branches:
        case ((_Part(branches=(), is_broad=False, least=least, most=most),),):
            return least == most
    return False


def _shortest(part: _Part) -> int:
    if not part.takes:
        return 0
    once = min(sum(map(_shortest, branch)) for branch in part.branches) if part.branches else 1
    return once * part.least


class _Reader:
    """Reads the regex from left to right. The parts that it does not know are refused, and so not misread."""

    def __init__(self, regex: str) -> None:
        self._regex = regex
        self.at = 0

    def refusal(self) -> RegexTooHard:
        return RegexTooHard(f"with {self._regex[self.at : self.at + 8]!r}, which llmnode does not know there")

    def branches(self, depth: int) -> tuple[tuple[_Part, ...], ...]:
        """Up to a `)`, which is left, or the end."""
        if depth > _DEPTH:
            raise RegexTooHard(f"with groups in more than {_DEPTH} others")
        found: list[list[_Part]] = [[]]
        while self.at < len(self._regex) and self._regex[self.at] != ")":
            if self._regex[self.at] == "|":
                self.at += 1
                found.append([])
            else:
                found[-1].append(self._repeated(self._part(depth)))
        return tuple(map(tuple, found))

    def _part(self, depth: int) -> _Part:
        if group := _GROUP.match(self._regex, self.at):
            self.at = group.end()
            branches = self.branches(depth + 1)
            if self.at >= len(self._regex):
                raise RegexTooHard("with a group that does not end")
            self.at += 1
            return _Part(branches, takes=group[1] not in _LOOKS)
        if self._regex[self.at] == "[":
            return _Part(is_broad=self._read_set())
        if anchor := _ANCHOR.match(self._regex, self.at):
            self.at = anchor.end()
            return _Part(takes=False)
        if escape := _ESCAPE.match(self._regex, self.at):
            self.at = escape.end()
            return _Part(is_broad=not _NARROW.fullmatch(escape[0]))
        if self._regex[self.at] in r"\()[]{}*+?":
            raise self.refusal()
        self.at += 1
        return _Part(is_broad=self._regex[self.at - 1] == ".")

    def _read_set(self) -> bool:
        """`[...]`, perhaps without the characters of another set: `[...&&[^...]]`. Other sets in sets are not read.

        Gives whether it is broad.
        """
        excludes = self._regex.startswith("[^", self.at)
        members = self._read_members()
        spaces = {member for member in members if member in _SPACES or member <= " "}
        if excludes:
            is_broad = not {r"\s", r"\S"} & members
        else:
            wide = any(member[0] == "\\" and not _NARROW.fullmatch(member) for member in members)
            is_broad = wide or r"\S" in members or (bool(spaces) and members != spaces)
        if self._regex.startswith("&&[", self.at):
            is_broad = is_broad or excludes  # `^` is about both sets together
            self.at += 2
            self._read_members()
            if not self._regex.startswith("]", self.at):
                raise self.refusal()
            self.at += 1
        if not self._regex.startswith("]", self.at):
            raise self.refusal()
        self.at += 1
        return is_broad

    def _read_members(self) -> set[str]:
        """Up to what may end them. One that comes first could be a member."""
        self.at += 2 if self._regex.startswith("[^", self.at) else 1
        start, members = self.at, set[str]()
        while self.at < len(self._regex):
            if self._regex[self.at] in "[]" or self._regex.startswith("&&", self.at):
                break
            if self._regex[self.at] == "\\":
                if not (escape := _ESCAPE.match(self._regex, self.at)):
                    raise self.refusal()
                self.at = escape.end()
                members.add(escape[0])
            else:
                members.add(self._regex[self.at])
                self.at += 1
        if self.at == start or self.at >= len(self._regex):
            raise RegexTooHard("with a set that does not end")
        return members

    def _repeated(self, part: _Part) -> _Part:
        regex, least, most = self._regex, 1, 1
        if self.at >= len(regex) or regex[self.at] not in "?*+{":
            return part
        if interval := _INTERVAL.match(regex, self.at):
            self.at = interval.end()
            least, most = int(interval[1]), int(interval[3] or interval[1])
            endless = bool(interval[2]) and interval[3] is None
        else:
            sign = regex[self.at]
            if sign == "{":
                raise self.refusal()
            self.at += 1
            least, endless = int(sign == "+"), sign != "?"
            if regex[self.at : self.at + 1] in ("?", "+"):  # lazy or possessive: it has no more ways
                self.at += 1
        if regex[self.at : self.at + 1] in ("?", "*", "+", "{"):
            raise self.refusal()
        if not part.takes:
            raise RegexTooHard("that repeats a place")
        return replace(part, least=least, most=None if endless else max(least, most))
