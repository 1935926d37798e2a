"""The text of an answer: what decoding prompt and answer together adds to decoding the prompt alone.

A tokenizer decodes a token by what is before it. Llama 2's has the space between two words in the second one's token,
and drops it from a text's first token, so that an answer decoded alone would stick to its prompt. Hence the law here:

    the pieces that `TextStream` gives, joined == `answer_text` == decode(prompt + answer) "minus" decode(prompt)

Nearly always decode(prompt) is how decode(prompt + answer) begins, and "minus" is the rest. Some tokenizers decode the
prompt's last characters otherwise when more follows: a byte becomes a character, or a space before a mark goes. Then
the answer begins at the first character that is not the prompt's, spaces that went aside (`_answer_begins`).

A piece that was given is never taken back. The part that later tokens may still change, by `decoding.py`, is held back
until they cannot: mostly half a character, in the worst case all of the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.models.text.tokenizer import Tokenizer

_WINDOW = 64
"""Tokens are decoded again as each new one comes, so that the text of a token depends on those before it; half as many
as this stay when the window moves. Each decoder looks back by one token, or by one run of bytes."""

_HALF = "\N{REPLACEMENT CHARACTER}"
"""How the end of a text decodes that is a part of a character's bytes. It may also be one that was meant."""


def answer_text(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text that `answer` adds to that of `prompt`."""
    whole = tokenizer.decode([*prompt, *answer])
    begins, _ = _answer_begins(whole, tokenizer.decode(prompt))
    return whole[begins:]


class TextStream:
    """The tokens of an answer in, its text out, in pieces: see above."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(prompt)
        self._before = tokenizer.decode(prompt)
        self._given = 0
        """Characters of the answer."""
        self._start = 0
        """The start of the window: tokens before it are no longer decoded."""
        self._next: int | None = None
        """Where in the window's text the next piece begins; None until it is settled where the prompt's text ends."""
        self._most = _WINDOW

    def add(self, token_id: int) -> str:
        """The text that is settled now, and has not been given yet; often nothing."""
        self._token_ids.append(token_id)
        reach = self._tokenizer.reach
        if reach.everything or self._tokenizer.is_silent(token_id):
            return ""
        if reach.byte_runs and self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._token_ids[self._start :])
        settled = len(text.rstrip(_HALF)) - reach.characters
        if self._next is None:
            begins, is_certain = _answer_begins(text[: max(0, settled)], self._before)
            if not is_certain:
                return ""
            self._next = begins
        piece = text[self._next : max(self._next, settled)]
        self._next += len(piece)
        self._given += len(piece)
        self._move_window(text)
        return piece

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        whole = self._tokenizer.decode(self._token_ids)
        begins, _ = _answer_begins(whole, self._before)
        piece = whole[begins + self._given :]
        self._given += len(piece)
        return piece

    def _move_window(self, text: str) -> None:
        """Let go of the first tokens if the others decode to how `text`, the window's, ends.

        The unsettled end of that, and a character more, must be the same. Then no remaining token is the first of a
        text to the decoder, which may treat that one in its own way.
        """
        if len(self._token_ids) - self._start <= self._most:
            return
        assert self._next is not None, "the window moves when it is settled where the prompt ends"
        start = len(self._token_ids) - _WINDOW // 2
        shorter = self._tokenizer.decode(self._token_ids[start:])
        waiting = len(text) - self._next
        same = waiting + self._tokenizer.reach.characters + 1
        if len(shorter) >= same and text.endswith(shorter[-same:]):
            self._start, self._next, self._most = start, len(shorter) - waiting, _WINDOW
        else:  # tokens that say nothing, or a long run of bytes: later, and so seldom that it costs little
            self._most = 2 * (len(self._token_ids) - self._start)


def _answer_begins(whole: str, before: str) -> tuple[int, bool]:
    """Where in `whole` the text ends that is `before`, and whether that is certain if more follows `whole`.

    At the first character that differs; but a space of `before` that `whole` does not have is passed over.
    """
    if whole.startswith(before):
        return len(before), True
    if before.startswith(whole):
        return len(whole), False
    at = 0
    for char in before:
        if at == len(whole):
            return at, False
        if whole[at] == char:
            at += 1
        elif not char.isspace():
            break
    return at, True
