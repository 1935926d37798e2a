"""Sets up a checkout: the environment, the locked dependencies with the embedded model, and the Rust extension.

It can be interrupted anywhere: what an earlier run left half done is made again. A failure is one line on stderr that
names the fix, and exit status 2; what the failed tool said is in `setup.log` in the environment. It does not know what
the program's arguments mean.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bootstrap.environment import (
    STAMP,
    Installed,
    Setup,
    base_python,
    clear,
    is_current,
    is_reusable,
    read_marker,
    write_atomically,
    write_marker,
)
from bootstrap.lock import FROM_PYTORCH, INSTALLERS, LOCKED, locked
from bootstrap.machine import check_machine
from bootstrap.messages import SetupError, explain_os_error, fail, say
from bootstrap.tools import ENDINGS, LOG, Tools, raise_interrupts_at


def main(argv: list[str]) -> int:
    own, program = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="bootstrap", usage="called by node/llmnode; after -- what the user gave it")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--sources-sum", required=True)
    options = parser.parse_args(own)
    setup_only = program[:1] == ["setup"]
    if setup_only and program[1:] not in ([], ["--dev"]):
        return fail("usage: node/llmnode setup [--dev]")
    setup = Setup(options.root, options.venv, options.sources_sum, dev=program == ["setup", "--dev"])

    raise_interrupts_at([each for each in ENDINGS[1:] if signal.getsignal(each) != signal.SIG_IGN])  # nohup
    try:
        set_up(setup)
    except SetupError as error:
        return fail(str(error))
    except OSError as error:
        return fail(explain_os_error(error, setup.venv))
    except KeyboardInterrupt:
        fail("interrupted; the next run goes on from here")
        return 130
    if not setup_only:
        os.execv(setup.python, [str(setup.python), "-P", "-m", "llmnode.node", *program])
    return 0


def set_up(setup: Setup) -> None:
    """Make the environment match the sources; do nothing when it does."""
    mend_package_link(setup.root / "python" / "llmnode" / "node")
    if is_current(setup):
        return
    with only_one_setup(setup.root):
        if is_current(setup):  # another launch did it while this one waited
            return
        installed = read_marker(setup.venv)
        reusable = is_reusable(setup, installed)
        environment = check_machine(setup, full=not reusable)
        (setup.venv / STAMP).unlink(missing_ok=True)
        if not reusable:
            clear(setup.venv, ours=installed.venv != "")
            installed = Installed(str(setup.venv), base_python(), dev=installed.dev)
            setup.venv.mkdir(parents=True, exist_ok=True)
            write_marker(setup.venv, installed)
        with open(setup.venv / LOG, "ab", buffering=0) as log:
            install(setup, installed, Tools(setup, environment, log.fileno()))
        write_atomically(setup.venv / STAMP, f"{setup.sources_sum}\n{os.path.realpath(setup.python)}\n")


def mend_package_link(link: Path) -> None:
    """A copy made by tools without symlinks holds the text of the package's link in its place."""
    if link.is_file() and not link.is_symlink():
        target = link.read_text().strip()
        link.unlink()
        link.symlink_to(target)


def install(setup: Setup, installed: Installed, tools: Tools) -> None:
    """The steps, leaving out those that an earlier run has finished."""
    installed = replace(installed, dev=installed.dev or setup.dev)
    lock = setup.root / ("requirements-dev.lock" if installed.dev else "requirements.lock")
    text = lock.read_text()
    if not installed.python:
        tools.run("environment", [sys.executable, "-I", "-m", "venv", setup.venv])
        first = setup.venv / "first.lock"
        first.write_text("".join(block for name, block in locked(text) if name in INSTALLERS))
        tools.run("installer", [setup.python, "-m", "pip", "install", *LOCKED, first])
        installed = replace(installed, python=os.path.realpath(setup.python))
    requirements = (f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",)
    if installed.requirements != requirements:
        # Marked as having none until all are in place: half a package looks installed to uv.
        write_marker(setup.venv, replace(installed, requirements=()))
        tools.take_indexes_from_pip()
        install_locked(setup, text, lock, tools)
        # libp2p needs trio-typing, whose stubs of an old trio would hide trio's own types from mypy and editors.
        for stubs in setup.venv.glob("lib/python*/site-packages/trio-stubs"):
            shutil.rmtree(stubs)
        write_marker(setup.venv, replace(installed, requirements=requirements))
    # Without isolation maturin is the one just installed: a rebuild needs no network.
    tools.uv("llmnode and its Rust extension", ["--no-deps", "--no-build-isolation", "--reinstall", "--editable", "."])


def install_locked(setup: Setup, text: str, lock: Path, tools: Tools) -> None:
    """The packages of a lock, each checked against its hashes, but for PyTorch from an index of its own.

    That index has other files of the same version than the lock knows, and a build for the CPU needs no CUDA.
    """
    if not tools.environment.get("UV_TORCH_BACKEND"):
        tools.uv("dependencies (PyTorch is large)", [*LOCKED, lock])
        return
    packages = locked(text)
    say("PyTorch comes from the index that UV_TORCH_BACKEND names: no lock has the hashes of its files there")
    others = setup.venv / "others.lock"
    others.write_text("".join(block for name, block in packages if not FROM_PYTORCH.fullmatch(name)))
    tools.uv("dependencies", [*LOCKED, others])
    tools.uv("PyTorch", [block.split(maxsplit=1)[0] for name, block in packages if name == "torch"])


@contextlib.contextmanager
def only_one_setup(root: Path) -> Iterator[None]:
    """The checkout itself is locked: the extension is built into it, whatever environment it is for."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
