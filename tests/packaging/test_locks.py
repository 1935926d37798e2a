"""The locks have what pyproject.toml asks for: set-up installs a lock, and does not look at pyproject.toml."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bootstrap.environment import Installed, Setup
from bootstrap.lock import INSTALLERS
from bootstrap.lock import locked as locked_blocks
from bootstrap.setup import install
from bootstrap.tools import Tools

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]

pytestmark = pytest.mark.packaging


def group(name: str) -> list[str]:
    """The requirements of a dependency group and of those that it includes."""
    entries = PYPROJECT["dependency-groups"][name]
    return [
        each for entry in entries for each in ([entry] if isinstance(entry, str) else group(entry["include-group"]))
    ]


def locked(name: str) -> list[tuple[str, Requirement, str]]:
    """The entries of a lock: the package, its version with the platforms that it is for, and the lines of the entry."""
    blocks = locked_blocks((ROOT / name).read_text())
    return [(package, Requirement(block.partition("\\")[0]), block) for package, block in blocks]


@pytest.mark.parametrize(
    ("lock", "asked"),
    [
        ("requirements.lock", [*DEPENDENCIES, *group("checkout")]),
        ("requirements-dev.lock", [*DEPENDENCIES, *group("dev")]),
    ],
)
def test_a_lock_has_a_version_that_fits_of_each_dependency(lock: str, asked: list[str]) -> None:
    entries = locked(lock)
    for requirement in map(Requirement, asked):
        versions = [
            str(entry.specifier).removeprefix("==")
            for package, entry, _lines in entries
            if package == canonicalize_name(requirement.name)
        ]
        assert versions, f"{requirement.name} is not locked: run .ci/lock"
        assert all(version in requirement.specifier for version in versions), f"{requirement}: run .ci/lock"


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-dev.lock", "requirements-oldest.lock"])
def test_each_entry_has_one_version_and_hashes(lock: str) -> None:
    entries = locked(lock)
    assert entries
    for _package, entry, lines in entries:
        assert [each.operator for each in entry.specifier] == ["=="]
        assert "--hash=sha256:" in lines


def test_the_overrides_are_in_the_lock() -> None:
    entries = {package: entry for package, entry, _lines in locked("requirements.lock")}
    for override in map(Requirement, PYPROJECT["tool"]["uv"]["override-dependencies"]):
        if override.specifier:
            assert entries[override.name].specifier == override.specifier
        else:
            assert override.name not in entries


def test_transformers_is_a_range_of_three_minor_versions_and_the_oldest_is_locked() -> None:
    (asked,) = (each for each in map(Requirement, DEPENDENCIES) if each.name == "transformers")
    ((_package, oldest, _lines),) = locked("requirements-oldest.lock")
    (newest,) = (entry for package, entry, _lines in locked("requirements.lock") if package == "transformers")
    first, last = (Version(str(entry.specifier).removeprefix("==")) for entry in (oldest, newest))
    assert str(first) in asked.specifier
    assert f">={first.major}.{first.minor}" in str(asked.specifier)
    assert last.minor - first.minor >= 2


@pytest.mark.parametrize(("dev", "lock"), [(False, "requirements.lock"), (True, "requirements-dev.lock")])
def test_set_up_installs_nothing_that_has_no_hash(
    dev: bool, lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that set-up would run. `.` is the checkout, and cargo has a lock of its own."""
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    setup = Setup(ROOT, tmp_path, "", dev=dev)
    commands: list[list[str]] = []
    tools = Tools(setup, {}, 2)
    monkeypatch.setattr(Tools, "run", lambda _tools, _step, command: commands.append([*map(str, command)]))
    monkeypatch.setattr(Tools, "take_indexes_from_pip", lambda _tools: None)
    install(setup, Installed(), tools)
    environment, first, all_others, own = commands
    assert environment[-3:-1] == ["-m", "venv"]
    for command in (first, all_others):
        assert {"--require-hashes", "--no-deps", "--no-build-isolation"} <= {*command}
        assert command[-2] == "--requirement"
    assert all_others[-1] == str(ROOT / lock)
    assert own[-2:] == ["--editable", "."] and {"--no-deps", "--no-build-isolation"} <= {*own}
    named = [package for package, _ in locked_blocks(Path(first[-1]).read_text())]
    assert sorted(named) == sorted(INSTALLERS)
    assert {"maturin", *INSTALLERS} <= {package for package, _, _ in locked(lock)}


def test_cargo_builds_what_its_lock_names() -> None:
    assert PYPROJECT["tool"]["maturin"]["locked"] is True
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    assert all("checksum" in each for each in packages if "source" in each)
