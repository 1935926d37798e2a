"""A release is installed in a root without a compiler, and serves the embedded model there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from netns.empty_root import EmptyRoot, open_empty_root, why_not
from process.conftest import Node

ROOT = Path(__file__).parents[2]
UV = Path(sys.prefix) / "bin" / "uv"
BY_PIP = bool(os.environ.get("LLMNODE_INSTALL_BY_PIP"))
"""Whether pip installs the newest versions, which takes minutes. uv installs the locked versions out of its cache."""

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(1800)]


def requirements(wheel: Path) -> dict[str, Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = message_from_bytes(archive.read(path)).get_all("Requires-Dist") or []
    return {requirement.name: requirement for requirement in map(Requirement, asked)}


def test_the_release_asks_for_what_the_checkout_overrides(release: Path) -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["override-dependencies"]
    asked = {name: each for wheel in release.glob("*+llmnode-*.whl") for name, each in requirements(wheel).items()}
    for override in map(Requirement, overrides):
        assert asked[override.name] == override


def copy_bytecode(packages: Path) -> None:
    """Copies what this environment has compiled of the same packages: three processes would compile torch at once.

    Python takes it if the source has the same time and size, which are those of uv's cache.
    """
    ours = Path(sysconfig.get_path("purelib"))
    for source in ours.rglob("*.py"):
        compiled, theirs = Path(cache_from_source(str(source))), packages / source.relative_to(ours)
        if compiled.exists() and theirs.is_symlink():
            (theirs.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copyfile(compiled, theirs.parent / "__pycache__" / compiled.name)


@pytest.fixture(scope="module")
def installed(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmptyRoot]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cache = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip()
    binds = {"/dist": release, "/lock": ROOT / "requirements.lock", "/usr/bin/uv": UV, "/root/.cache/uv": Path(cache)}
    with open_empty_root(tmp_path_factory.mktemp("root"), binds) as root:
        if BY_PIP:
            root.run("python3", "-m", "venv", "/env")
            root.run("sh", "-c", "pip install /dist/*.whl", timeout_s=1500)
        else:
            root.run("uv", "venv", "/env")
            root.run("sh", "-c", "uv pip install --link-mode symlink --constraint /lock --python /env /dist/*.whl")
            (packages,) = root.folder.glob("env/lib/python3.*/site-packages")
            copy_bytecode(packages)
        yield root


def test_there_is_nothing_to_compile_with(installed: EmptyRoot) -> None:
    asks = "import os, shutil; print([shutil.which(name) for name in ('cc', 'gcc', 'clang', 'ld', 'cargo', 'rustc')])"
    assert installed.run("python", "-c", asks).strip() == str([None] * 6)
    assert installed.run("python", "-c", "import os; print(os.path.exists('/usr/include'))").strip() == "False"


def test_the_library_is_imported_and_the_program_runs(installed: EmptyRoot) -> None:
    where = installed.run("python", "-c", "import llmnode._native as native; print(native.__file__)")
    assert where.startswith("/env/lib/")
    assert "0.1.0" in installed.run("llmnode", "--version")


def test_a_server_and_a_chat_run_with_the_embedded_model(installed: EmptyRoot) -> None:
    server = subprocess.Popen(
        installed.command("llmnode", "serve", "--no-mdns", "--json", "--until-stdin-closes"),
        env=installed.environment(HF_HUB_OFFLINE="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    node = Node(server)
    try:
        node.wait_ready()
        options = ("--peers", node.address, "--max-new-tokens", "8", "--temperature", "0")
        assert installed.run("llmnode", "chat", *options, answers="Why is the sky blue?\n").strip()
    finally:
        node.stop()
