"""Packages that cargo has compiled are there for the next build of the same lock, without our own crates."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from bench.kit.compiled_packages import compiled_packages, main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="there is no cargo")
PACKAGE, OWN = "release/deps/libring-1.rlib", "release/deps/libllmnode_transport-1.rlib"
SCRIPT, OWN_TEST = "debug/build/ring-1/build-script-build", "debug/deps/yamux-1"


def build(target: Path, lock: Path, **settings: str) -> list[str]:
    """The files that a build finds in its target folder. It makes a package and our crate."""
    with compiled_packages("tried", target, lock, settings):
        found = sorted(str(each.relative_to(target)) for each in target.rglob("*") if each.is_file())
        for name in (PACKAGE, OWN):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(f"{name} of {target.name}")
    return found


def test_the_next_build_finds_the_packages_of_the_same_lock_and_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "Cargo.lock"
    lock.write_text("ring 1")
    assert build(tmp_path / "first", lock) == []
    assert build(tmp_path / "second", lock) == [PACKAGE]
    assert build(tmp_path / "optimized", lock, OPT_LEVEL="3") == []
    lock.write_text("ring 2")
    assert build(tmp_path / "newer", lock, OPT_LEVEL="3") == []
    assert build(tmp_path / "newest", lock, OPT_LEVEL="3") == [PACKAGE]
    assert len(list((tmp_path / "cache" / "cargo").iterdir())) == 1, "what nobody builds any more is removed"


def test_a_build_that_fails_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "Cargo.lock"
    lock.write_text("ring 1")
    with pytest.raises(ZeroDivisionError), compiled_packages("tried", tmp_path / "target", lock, {}):
        raise ZeroDivisionError
    assert build(tmp_path / "next", lock) == []


def test_a_clean_checkout_begins_with_what_an_earlier_one_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path / "cache"))
    first, second = tmp_path / "first", tmp_path / "second"
    main(["begin", str(first)])
    assert not first.exists()
    for name in (PACKAGE, OWN, SCRIPT, OWN_TEST):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).touch()
    main(["keep", str(first)])
    main(["begin", str(second)])
    assert {str(each.relative_to(second)) for each in second.rglob("*") if each.is_file()} == {PACKAGE, SCRIPT}
    (first / PACKAGE).unlink()
    main(["begin", str(first)])
    assert not (first / PACKAGE).exists(), "it is not clean"
