"""Text and paths of users: read as any editor saves and any shell expands them, or refused with the place."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.user_input import (
    Unreadable,
    decode,
    expand_path,
    find_no_text,
    home_folder,
    path_from,
    read_file,
    recover_text,
    split_lines,
)
from llmnode.errors import ConfigError
from llmnode.machine.cache_folder import cache_folder
from llmnode.net.invite import Invite, write_invite
from llmnode.net.swarm_key import entry, make_key, read_key
from llmnode.node.generate import read_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "UTF-8": str.encode,
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "UTF-16 LE": lambda text: b"\xff\xfe" + text.encode("utf-16-le"),
    "UTF-16 BE": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
}
NO_ENDS = "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e"
"""Characters at which str.splitlines ends a line, though they are no ends of lines."""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_lines_are_the_same_however_they_are_saved(encode: Callable[[str], bytes], end: str, tmp_path: Path) -> None:
    lines = ["Once", f"é 好 😀 {NO_ENDS}", "", "last"]
    for text in (end.join(lines), end.join(lines) + end):
        assert split_lines(decode(encode(text))) == lines
    (tmp_path / "prompts").write_bytes(encode(end.join(lines)))
    found = read_prompts(tmp_path / "prompts")
    assert [prompt.text for prompt in found] == [lines[0], lines[1], lines[3]]
    assert found[2].source == f"--prompts {tmp_path / 'prompts'}, line 4"


@given(st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))))
def test_only_three_things_end_a_line(lines: list[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    assert split_lines(decode(text.encode())) == ([] if text == "" else lines)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"\xff", "line 1, byte 1: 0xff is no UTF-8: save it as UTF-8"),
        (b"one\r\ntwo\rth\xe9ee", "line 3, byte 3: 0xe9 is no UTF-8: save it as UTF-8"),
        ("é\n好".encode() + b"\xc3", "line 2, byte 4: 0xc3 is no UTF-8"),
        (b"\xef\xbb\xbfa\n\xff", "line 2, byte 1: 0xff is no UTF-8"),
        ("a\nb".encode("utf-16-le"), "line 1, byte 2: a NUL, which no text has: save it as UTF-8"),
        (b"\xff\xfea\0\n\0\x00\xd8b\0", "line 2, byte 1: 0x00 is no UTF-16-LE"),
        (b"\xff\xfea\0b", "line 1, byte 3: 0x62 is no UTF-16-LE"),
        ("\ud800".encode("utf-8", "surrogatepass"), "line 1, byte 1: 0xed is no UTF-8"),
    ],
)
def test_bytes_that_are_no_text_are_named_by_their_place(content: bytes, place: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_prompts(file)
    assert str(raised.value).startswith(f"--prompts {file}, {place}")
    assert "\n" not in str(raised.value)


@given(st.binary(max_size=40))
def test_any_bytes_are_text_or_refused_in_a_line(content: bytes) -> None:
    with suppress(ConfigError):
        assert "\0" not in decode(content, "file")
        return
    with pytest.raises(ConfigError, match=r"^file, line [0-9]+, byte [0-9]+: .*: save it as UTF-8$"):
        decode(content, "file")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """`--prompts <(command)` gives such a file."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"one\ntwo"))
    writer.start()
    assert read_file(fifo, "it", 100) == b"one\ntwo"
    writer.join()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "No such file"),
        ("file/x", "Not a directory"),
        (".", "Is a directory"),
        ("x" * 300, "too long"),
        ("a\0", "null"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_fix(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unreadable, match=f"^it: cannot be read \\(.*{why}.*\\): do that$") as raised:
        read_file(tmp_path / name, "it", 100, fix="do that")
    assert raised.value.is_missing == (why in ("No such file", "Not a directory"))


def test_more_than_the_most_is_refused() -> None:
    with pytest.raises(ConfigError, match="it: has more than 10 bytes"):
        read_file(Path("/dev/zero"), "it", 10)


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS)
def test_keys_and_invites_are_read_as_editors_save_them(encode: Callable[[str], bytes], tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = make_key(path)
    text, invite = path.read_text(), write_invite(Invite(("peer",), key))
    path.write_bytes(encode(text.replace("\n", "\r\n") + "\r\n"))
    assert read_key(path) == key
    path.write_bytes(encode(f"{invite}\r\n"))
    assert entry([], path) == entry([], f" {invite}\n") == entry([], invite)


def test_paths_are_as_a_shell_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/the/home")
    variables = {"DATA": "/data", "HOME": "/the/home"}
    assert expand_path("~", variables) == Path("/the/home")
    assert expand_path("~/$DATA/a b") == Path("/the/home/$DATA/a b"), "of a command line, where a shell has been"
    assert expand_path("$DATA/${DATA}x", variables) == Path("/data//datax")
    assert expand_path("~root/x") == Path("/root/x")
    assert expand_path("~nobody-here/x") == Path("~nobody-here/x"), "as a shell leaves it"
    assert expand_path("a/~/b", variables) == Path("a/~/b")
    for wrong in ("", "a\0b", "$NOPE/x", "${NOPE}"):
        with pytest.raises(ConfigError):
            expand_path(wrong, variables)


def test_variables_of_the_environment_name_paths_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/the/home")
    for text, path in {
        "~/c": "/the/home/c",
        "$HOME/c": "/the/home/c",
        "/c": "/c",
        "": "/the/home/.cache/llmnode",
    }.items():
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("LLMNODE_CACHE", text)
        assert cache_folder() == Path(path)
    monkeypatch.setenv("LLMNODE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/x")
    assert cache_folder() == Path("/the/home/x/llmnode")
    assert path_from({}, "A") is path_from({"A": ""}, "A") is None
    with pytest.raises(ConfigError, match=r"^A=\$NOPE/x: the variable NOPE is not set"):
        path_from({"A": "$NOPE/x"}, "A")


def test_without_a_home_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    with pytest.raises(ConfigError, match="no home folder is known: set HOME"):
        home_folder({}, "XDG_CACHE_HOME", ".cache")


def test_bytes_of_a_command_line_that_are_no_text_are_found() -> None:
    assert find_no_text("é\u2028") == ""
    assert find_no_text("ab\udcff") == "0xff after 2 characters is no UTF-8"
    assert recover_text("\udcc3\udca9") == "é", "an ASCII locale had it so"
    assert recover_text("\udcff") == "\udcff"
