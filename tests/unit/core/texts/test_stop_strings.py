"""Stop strings in a text that comes in pieces: nothing of them is ever shown, and nothing else is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.texts.stop_strings import StopText

few = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def ends(text: str, strings: list[str], begins: int) -> list[int]:
    """Where a stop string ends that has a character from `begins` on."""
    return [end for end in range(begins + 1, len(text) + 1) if any(text[:end].endswith(each) for each in strings)]


@given(prompt=few, answer=few, strings=stops, data=st.data())
def test_a_text_ends_before_its_first_stop_string_however_it_comes(
    prompt: str, answer: str, strings: list[str], data: st.DataObject
) -> None:
    """The first piece in which a stop string ends is the last one."""
    whole, stream, given_text = prompt + answer, StopText(strings, prompt), ""
    at, stopped = 0, False
    while at < len(answer) and not stopped:
        size = data.draw(st.integers(1, len(answer) - at))
        piece, at = answer[at : at + size], at + size
        stopped = bool(ends(whole[: len(prompt) + at], strings, len(prompt)))
        if not stopped:
            given_text += stream.add(piece)
            assert answer.startswith(given_text), "nothing is taken back"
            kept = len(answer[:at]) - len(given_text)
            seen = whole[: len(prompt) + at]
            assert not kept or any(
                each.startswith(seen[-length:]) for each in strings for length in range(kept, len(each))
            ), "what is held back may begin a stop string"
    if not stopped:
        assert given_text + stream.finish("", stopped=False) == answer
        return
    given_text += stream.finish(piece, stopped=True)
    seen = whole[: len(prompt) + at]
    begins = min(
        start
        for each in strings
        for start in range(len(seen))
        if seen.startswith(each, start) and len(prompt) < start + len(each)
    )
    assert given_text == answer[: max(0, begins - len(prompt))]


def test_a_stop_string_that_only_tokens_show_cuts_nothing() -> None:
    assert StopText(["<end>"]).finish("all of it", stopped=True) == "all of it"


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopText([]).add("text") == "text"
