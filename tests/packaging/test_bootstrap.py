"""The launcher and the set-up behind it, run as a user would, on copies of this checkout in a path with a space."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kit.compiled_packages import UNOPTIMIZED
from bootstrap.environment import Setup
from bootstrap.messages import explain
from bootstrap.setup import mend_package_link
from bootstrap.tools import Tools, running

ROOT = Path(__file__).parents[2]
EXTENSION_STEP = "llmnode and its Rust extension"
POSIX_TOOLS = ("cksum", "env", "find", "readlink", "sh", "sort", "xargs")

pytestmark = pytest.mark.packaging


def copy_checkout(place: Path) -> Path:
    unwanted = shutil.ignore_patterns(".git", ".venv", "target", "tests", "__pycache__", ".*_cache", "*.so")
    return Path(shutil.copytree(ROOT, place / "a checkout", symlinks=True, ignore=unwanted))


def user_environment(**changes: str) -> dict[str, str]:
    # Each checkout its own target: cargo judges by time, and might hand a copy's extension to this one, or the reverse.
    unwanted = ("LLMNODE_", "VIRTUAL_ENV", "CARGO_TARGET_DIR")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return inherited | UNOPTIMIZED | changes


def launch(checkout: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [checkout / "node" / "llmnode", *arguments]
    return subprocess.run(
        command, env=user_environment(**changes), cwd="/", capture_output=True, text=True, check=False, timeout=600
    )


def begin(checkout: Path, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    command = [checkout / "node" / "llmnode", *arguments]
    return subprocess.Popen(
        command, env=user_environment(**changes), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def assert_fails_in_one_line(answer: subprocess.CompletedProcess[str], *words: str) -> None:
    last_line = answer.stderr.splitlines()[-1]
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    assert last_line.startswith("llmnode: ")
    for word in words:
        assert word in last_line


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def base_python() -> str:
    return os.path.realpath(sys.executable)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path)


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with a Python and what every system has, and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in POSIX_TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or "/nonexistent")
    script(folder / "python3", f'exec "{base_python()}" "$@"')
    return folder


# A missing tool is named, and nothing is left behind


def test_a_python_too_old_is_named(checkout: Path, bare_path: Path) -> None:
    for name in ("python", "python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        script(bare_path / name, "echo 3.9")
    answer = launch(checkout, "--version", PATH=str(bare_path))
    assert_fails_in_one_line(answer, "Python 3.11", "python3 is 3.9", "apt install python3")
    assert len(answer.stderr.splitlines()) == 1


def test_no_python_is_named(checkout: Path, bare_path: Path) -> None:
    (bare_path / "python3").unlink()
    assert_fails_in_one_line(launch(checkout, PATH=str(bare_path)), "Python 3.11", "none of these runs")


def test_a_python_that_does_not_run_is_passed_over(checkout: Path, bare_path: Path) -> None:
    (bare_path / "python3").rename(bare_path / "python3.12")
    script(bare_path / "python3", "echo 'pyenv: python3: command not found' >&2; exit 127")
    answer = launch(checkout, PATH=str(bare_path), HOME=str(bare_path), CARGO_HOME="")
    assert_fails_in_one_line(answer, "Rust is missing")


def test_missing_rust_is_named(checkout: Path, bare_path: Path) -> None:
    answer = launch(checkout, "--version", PATH=str(bare_path), HOME=str(bare_path), CARGO_HOME="")
    assert_fails_in_one_line(answer, "Rust is missing", "https://rustup.rs", "apt install cargo")
    assert len(answer.stderr.splitlines()) == 1
    assert not (checkout / ".venv").exists()


def test_rust_too_old_is_named(checkout: Path, bare_path: Path) -> None:
    script(bare_path / "cargo", "echo cargo 1.60.0")
    answer = launch(checkout, PATH=str(bare_path), HOME=str(bare_path), CARGO_HOME="")
    assert_fails_in_one_line(answer, "cargo 1.60.0 is too old", "rustup update")


def test_rust_that_does_not_run_is_named(checkout: Path, bare_path: Path) -> None:
    script(bare_path / "cargo", "echo 'no default toolchain' >&2; exit 1")
    answer = launch(checkout, PATH=str(bare_path), HOME=str(bare_path), CARGO_HOME="")
    assert_fails_in_one_line(answer, "does not run (no default toolchain)", "rustup default stable")


def test_a_python_without_ensurepip_is_named(checkout: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stdlib"
    stripped.mkdir()
    (stripped / "sitecustomize.py").write_text(
        "import importlib.util as u; f = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'ensurepip' else f(name, *rest)\n"
    )
    # The launcher's -I would hide the doctored library.
    python = script(tmp_path / "python", f'shift; PYTHONPATH="{stripped}" exec "{base_python()}" "$@"')
    assert_fails_in_one_line(launch(checkout, LLMNODE_PYTHON=str(python)), "apt install python3-venv")


def test_a_disk_too_small_is_named_before_anything_is_made(checkout: Path) -> None:
    answer = launch(checkout, "--version", LLMNODE_SETUP_GIB="1e9")
    assert_fails_in_one_line(answer, "GiB free", "LLMNODE_VENV")
    assert not (checkout / ".venv").exists()


def test_an_environment_of_someone_else_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "pyvenv.cfg").write_text("home = /usr/bin\n")
    answer = launch(checkout, "--version", LLMNODE_VENV=str(theirs))
    assert_fails_in_one_line(answer, "was not made by llmnode")
    assert [path.name for path in theirs.iterdir()] == ["pyvenv.cfg"]


def test_no_network_is_named(checkout: Path, tmp_path: Path) -> None:
    answer = launch(
        checkout, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0", PIP_NO_CACHE_DIR="1", PIP_FIND_LINKS=""
    )
    assert_fails_in_one_line(answer, "installer: packages cannot be reached", str(checkout / ".venv" / "setup.log"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_fills_up_during_set_up_is_named(checkout: Path, small_disk: Path) -> None:
    for _ in range(2):  # the second time it starts from what the first has left
        answer = launch(checkout, LLMNODE_VENV=str(small_disk), LLMNODE_SETUP_GIB="0")
        assert_fails_in_one_line(answer, "the disk", "full", "free some space")


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("error: linker `cc` not found\n |\nnote: No such file", "apt install build-essential"),
        (
            "src/x.c:1:10: fatal error: gmp.h: No such file or directory\nerror: command '/usr/bin/gcc' failed",
            "libgmp-dev",
        ),
        ("src/x.c:1:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("error: failed to write to file: No space left on device (os error 28)", "the disk is full"),
        ("Caused by: client error (Connect)\nCaused by: dns error", "check the network"),
        (
            "error: Failed to download `six==1.17.0`\n  cause: Hash mismatch for `six==1.17.0`\n",
            "six==1.17.0 is another file",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. (...)\n    uv==0.13.9 from https://...",
            "uv==0.13.9 is another file",
        ),
        ("error[E0308]: mismatched types\nerror: could not compile `x`\nhint: look above", "could not compile `x`"),
        ("", "it said nothing"),
    ],
)
def test_what_a_failed_tool_says_is_explained(output: str, fix: str) -> None:
    assert fix in explain(output)


# Set-up itself


def test_ctrl_c_while_a_tool_is_being_started_ends_that_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    setup = Setup(tmp_path, tmp_path, "", dev=False)
    tools = Tools(setup, dict(os.environ), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt), running(["sleep", "600"], tools):
        pytest.fail("it goes on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    os.close(tools.log_fd)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.fixture(scope="module")
def set_up(tmp_path_factory: pytest.TempPathFactory, unoptimized: Path) -> Path:
    """A checkout set up the hard way: interrupted once, then by two launches at the same moment."""
    checkout = copy_checkout(tmp_path_factory.mktemp("set-up"))
    interrupted = begin(checkout, "--version", CARGO_TARGET_DIR=str(unoptimized))
    assert interrupted.stderr is not None
    for line in interrupted.stderr:
        if line.startswith("llmnode: dependencies"):
            interrupted.send_signal(signal.SIGINT)
            break
    assert "interrupted" in interrupted.communicate(timeout=60)[1]
    assert interrupted.returncode == 130

    launches = [begin(checkout, "--version", CARGO_TARGET_DIR=str(unoptimized)) for _ in range(2)]
    outputs = [launch.communicate(timeout=600) for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], outputs
    assert all("0.1.0" in stdout for stdout, _ in outputs)
    assert sum(f"{EXTENSION_STEP} ..." in stderr for _, stderr in outputs) == 1, "both set up"
    return checkout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_second_start_needs_nothing_but_the_environment(set_up: Path, bare_path: Path) -> None:
    (bare_path / "python3").unlink()  # and so cannot have run the set-up
    answer = launch(set_up, "--version", PATH=str(bare_path))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "0.1.0" in answer.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_launcher_works_through_a_link(set_up: Path, tmp_path: Path) -> None:
    (tmp_path / "hop").symlink_to(set_up / "node" / "llmnode")
    (tmp_path / "llmnode").symlink_to("hop")
    answer = subprocess.run(
        [tmp_path / "llmnode", "--version"], env=user_environment(), capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_changed_rust_source_rebuilds_the_extension_alone(set_up: Path, unoptimized: Path) -> None:
    with open(set_up / "transport_rs" / "src" / "lib.rs", "a") as source:
        source.write("// changed\n")
    answer = launch(set_up, "--version", CARGO_TARGET_DIR=str(unoptimized))
    assert answer.returncode == 0, answer.stderr
    assert {line.rstrip(".0123456789 s") for line in answer.stderr.splitlines()} == {
        f"llmnode: {EXTENSION_STEP}",
        f"llmnode: {EXTENSION_STEP}:",
    }
    assert launch(set_up, "--version").stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_copied_environment_is_made_again(set_up: Path, tmp_path: Path) -> None:
    """Its scripts, and its way to the library, would lead to the checkout it was copied from."""
    copy = copy_checkout(tmp_path)
    (copy / ".venv").mkdir()
    for name in ("llmnode.json", "llmnode.stamp"):
        shutil.copy(set_up / ".venv" / name, copy / ".venv" / name)
    answer = launch(copy, "--version", LLMNODE_SETUP_GIB="1e9")
    assert_fails_in_one_line(answer, "GiB free")


def test_a_copy_made_without_symlinks_is_mended(tmp_path: Path) -> None:
    link = tmp_path / "node"
    link.write_text("../../node")
    for _again in range(2):
        mend_package_link(link)
        assert os.readlink(link) == "../../node"
