"""A folder is refused if somebody else may write to it, or could put another in its place."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from llmnode.errors import ConfigError
from llmnode.machine import private_folder
from llmnode.machine.cache_folder import cache_folder, check_disk_space, make_in_cache, write_in_cache
from llmnode.machine.private_folder import find_stranger

if TYPE_CHECKING:
    from collections.abc import Callable

SOMEBODY = 54321


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is fine, two levels below one of ours."""
    monkeypatch.setattr(grp, "getgrgid", lambda group: SimpleNamespace(gr_name=f"group{group}", gr_mem=[]))
    (tmp_path / "above" / "cache").mkdir(parents=True, mode=0o755)
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it belong to another user."""
    lstat = Path.lstat

    def changed(self: Path) -> os.stat_result:
        found = lstat(self)
        return os.stat_result((*found[:4], SOMEBODY, *found[5:])) if self == path else found

    monkeypatch.setattr(Path, "lstat", changed)


def _through_a_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = place.parents[1] / "elsewhere"
    elsewhere.mkdir()
    place.rmdir()
    place.symlink_to("../elsewhere")
    assert find_stranger(place) == ""
    elsewhere.chmod(0o777)


def _link_of_somebody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.parents[1] / "elsewhere").mkdir()
    place.rmdir()
    place.symlink_to(place.parents[1] / "elsewhere")
    _give_away(place, monkeypatch)


def _loop(place: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    place.rmdir()
    place.symlink_to(place)


UNSAFE: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], None], str]] = {
    "everybody": (lambda place, _: place.chmod(0o757), "may be written by everybody"),
    "everybody, sticky": (lambda place, _: place.chmod(0o1777), "may be written by everybody"),
    "a group": (lambda place, _: place.chmod(0o775), "may be written by the group"),
    "everybody above": (lambda place, _: place.parent.chmod(0o777), "above may be written by everybody"),
    "a group above": (lambda place, _: place.parent.chmod(0o770), "above may be written by the group"),
    "somebody": (_give_away, f"belongs to the user {SOMEBODY}"),
    "somebody above": (lambda place, patch: _give_away(place.parent, patch), f"above belongs to the user {SOMEBODY}"),
    "a link": (_through_a_link, "elsewhere may be written by everybody"),
    "somebody's link": (_link_of_somebody, f"belongs to the user {SOMEBODY}"),
    "a loop": (_loop, "more than 40 links"),
}


@pytest.mark.parametrize(("change", "why"), UNSAFE.values(), ids=UNSAFE.keys())
def test_a_cache_that_others_may_write_is_refused(
    change: Callable[[Path, pytest.MonkeyPatch], None], why: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() == place
    change(place, monkeypatch)
    for parts in ([], ["models"], ["models", "a", "b"]):
        with pytest.raises(ConfigError, match=why) as refused:
            cache_folder(*parts)
        assert "set LLMNODE_CACHE" in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_in_the_cache_counts_as_well(place: Path) -> None:
    (place / "models").mkdir(mode=0o700)
    assert cache_folder("models", "a")
    (place / "models").chmod(0o777)
    assert cache_folder()
    with pytest.raises(ConfigError, match="models may be written by everybody"):
        cache_folder("models", "a")


def test_a_file_that_others_may_write_counts_as_well(place: Path) -> None:
    (place / "x.json").write_text("{}")
    (place / "x.json").chmod(0o666)
    with pytest.raises(ConfigError, match=r"x\.json may be written by everybody"):
        cache_folder("x.json")


def test_a_folder_for_all_on_the_way_is_fine_if_it_is_sticky(place: Path) -> None:
    place.parent.chmod(0o1777)
    assert cache_folder() == place


def test_roots_folders_and_a_private_group_are_fine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwuid(os.geteuid())
    place.chmod(0o775)
    os.chown(place, -1, user.pw_gid)
    monkeypatch.setattr(grp, "getgrgid", lambda _group: SimpleNamespace(gr_name=user.pw_name, gr_mem=[user.pw_name]))
    assert find_stranger(place) == ""
    monkeypatch.setattr(grp, "getgrgid", lambda _group: SimpleNamespace(gr_name=user.pw_name, gr_mem=["mallory"]))
    assert "may be written by the group" in find_stranger(place)
    assert find_stranger(Path("/usr/lib")) == ""


def test_what_is_made_in_it_is_for_its_user_to_write(place: Path) -> None:
    before = os.umask(0)
    try:
        make_in_cache(place / "a" / "b")
        check_disk_space(place / "c" / "d", 0)
        write_in_cache(place / "e" / "f.json", "{}")
    finally:
        os.umask(before)
    for path in place.rglob("*"):
        assert find_stranger(path) == "", path
    assert (place / "e" / "f.json").read_text() == "{}"
    assert [each.name for each in (place / "e").iterdir()] == ["f.json"], "nothing is left beside it"


def test_a_folder_that_somebody_makes_meanwhile_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _give_away(place / "models", monkeypatch)
    with pytest.raises(ConfigError, match=f"belongs to the user {SOMEBODY}"):
        make_in_cache(place / "models")


def test_in_a_user_namespace_without_root_its_folders_are_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    told = {"/proc/self/uid_map": "1000 1000 1\n", "/proc/sys/kernel/overflowuid": f"{SOMEBODY}\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **more: told.get(str(self)) or read_text(self, **more))
    private_folder._trusted.cache_clear()
    try:
        assert SOMEBODY in private_folder._trusted()
    finally:
        private_folder._trusted.cache_clear()
    monkeypatch.undo()
    assert SOMEBODY not in private_folder._trusted()
