"""Sets up a checkout: the environment, the locked dependencies with the embedded model, and the Rust extension.

Called by the launcher beside it, with any Python >= 3.11; standard library only. It can be interrupted anywhere: what
an earlier run left half done is made again. A failure is one line on stderr that names the fix, and exit status 2;
what the failed tool said is in `setup.log` in the environment. It does not know what the program's arguments mean.
"""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FULL_SETUP_GIB = 8.0  # PyTorch with CUDA unpacked, and its wheels in uv's cache when that is on the same disk
REBUILD_GIB = 0.5
STAMP, MARKER, LOG = "llmnode.stamp", "llmnode.json", "setup.log"
LOCKED = ("--require-hashes", "--no-deps", "--no-build-isolation", "--requirement")
"""Nothing is installed that has no hash in the lock, and nothing is fetched to build a package with."""
INSTALLERS = ("uv", "setuptools")
"""They come first. Two packages have no wheels, and are built by setuptools."""
FROM_PYTORCH = re.compile("torch|triton|(cuda|nvidia)-.*")
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""With all of them the tools end first."""


class SetupError(Exception):
    """One line for the user: what is wrong, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The environment to set up, and its place."""

    root: Path
    venv: Path
    sources_sum: str
    dev: bool

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Installed:
    """The content of the marker in an environment that an earlier run made."""

    venv: str = ""  # where it was made: its scripts name this path
    made_by: str = ""
    python: str = ""  # what its bin/python led to; an upgrade of the system's Python changes that, and breaks it
    requirements: tuple[str, ...] = ()  # the lock's digest; nothing while its packages are being installed
    dev: bool = False


def main(argv: list[str]) -> int:
    own, program = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="bootstrap.py", usage="called by node/llmnode; after -- what the user gave it"
    )
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


def install(setup: Setup, installed: Installed, tools: "Tools") -> None:
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


def install_locked(setup: Setup, text: str, lock: Path, tools: "Tools") -> None:
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


def locked(text: str) -> list[tuple[str, str]]:
    """The packages of a lock by name, each as the lines that it is there: version, where it applies, hashes."""
    blocks = re.findall(r"^\S+==.*\n(?:[ ].*\n)*", text, re.MULTILINE)
    return [(block.partition("==")[0], block) for block in blocks]


# The environment that is there


def is_current(setup: Setup) -> bool:
    installed = read_marker(setup.venv)
    try:
        stamped = (setup.venv / STAMP).read_text().splitlines()
    except FileNotFoundError:
        return False
    natives = list((setup.root / "python" / "llmnode").glob("_native*.so"))
    return (
        is_reusable(setup, installed)
        and stamped == [setup.sources_sum, os.path.realpath(setup.python)]
        and bool(natives)
        and installed.dev >= setup.dev
    )


def is_reusable(setup: Setup, installed: Installed) -> bool:
    """Whether the environment needs no more than an update."""
    return (
        installed.requirements != ()
        and installed.venv == str(setup.venv)  # else it was copied or moved, and its scripts start another one's Python
        and installed.python == os.path.realpath(setup.python)
        and os.access(setup.python, os.X_OK)
        and (not os.environ.get("LLMNODE_PYTHON") or installed.made_by == base_python())
    )


def base_python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def read_marker(venv: Path) -> Installed:
    try:
        fields = json.loads((venv / MARKER).read_text())
        return Installed(**{**fields, "requirements": tuple(fields["requirements"])})
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return Installed()


def write_marker(venv: Path, installed: Installed) -> None:
    write_atomically(venv / MARKER, json.dumps(asdict(installed), indent=1))


def clear(venv: Path, *, ours: bool) -> None:
    """Remove what an earlier run left; nothing that it did not make."""
    if not ours and venv.is_dir() and any(venv.iterdir()):
        raise SetupError(f"{venv} was not made by llmnode: remove it, or name another place in LLMNODE_VENV, and retry")
    if venv.is_symlink() or venv.is_mount():  # someone chose where it lives
        for entry in venv.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    elif venv.exists():
        shutil.rmtree(venv)


# The needs of set-up


def check_machine(setup: Setup, *, full: bool) -> dict[str, str]:
    """The environment to run the tools in. Raises SetupError when something is missing that we cannot install."""
    if full and not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"{sys.executable} cannot make environments: `apt install python3-venv` (or {package}) and run again"
        )
    environment = tool_environment(setup)
    check_rust(setup, environment)
    check_disk(setup.venv, full=full)
    return environment


def tool_environment(setup: Setup) -> dict[str, str]:
    of_another = ("PYTHON", "VIRTUAL_ENV", "CONDA")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_another)}
    cargo_home = environment.get("CARGO_HOME") or os.path.expanduser("~/.cargo")
    environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), os.path.join(cargo_home, "bin")])
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    environment["NO_COLOR"] = "1"
    environment.setdefault("CARGO_TARGET_DIR", str(setup.root / "target"))
    if "PIP_CERT" in environment:
        environment.setdefault("SSL_CERT_FILE", environment["PIP_CERT"])
    return environment


def check_rust(setup: Setup, environment: dict[str, str]) -> None:
    manifest = read_toml(setup.root / "transport_rs" / "Cargo.toml")
    needed = manifest["package"]["rust-version"]
    for tool in ("cargo", "rustc"):
        path = shutil.which(tool, path=environment["PATH"])
        if path is None:
            raise SetupError(
                f"Rust is missing (no {tool}): install it from https://rustup.rs (or `apt install cargo`, "
                f"if that is {needed} or newer) and run again"
            )
        answer = tool_output([path, "--version"], environment, setup.root)
        found = re.search(r"\d+(\.\d+)+", answer.stdout)
        if answer.returncode != 0 or found is None:
            said = " ".join(answer.stderr.split())[:200]
            raise SetupError(f"{path} does not run ({said}): try `rustup default stable` and run again")
        if version_tuple(found[0]) < version_tuple(needed):
            raise SetupError(
                f"{tool} {found[0]} is too old, {needed} is needed: `rustup update` (https://rustup.rs) and run again"
            )


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check_disk(venv: Path, *, full: bool) -> None:
    needed_gib = float(os.environ.get("LLMNODE_SETUP_GIB", FULL_SETUP_GIB)) if full else REBUILD_GIB
    existing = next(folder for folder in (venv, *venv.parents) if folder.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    if free_gib < needed_gib:
        raise SetupError(
            f"the disk of {venv} has {free_gib:.1f} GiB free and set-up needs {needed_gib:g}: make room, "
            "or name a place on another disk in LLMNODE_VENV, and run again"
        )


# Running the tools


@dataclass(slots=True)
class Tools:
    """Runs one tool after the other, all output to the log, one line a step to stderr."""

    setup: Setup
    environment: dict[str, str]
    log_fd: int

    def uv(self, step: str, arguments: Sequence[str | Path]) -> None:
        self.run(step, [self.setup.python, "-m", "uv", "pip", "install", "--python", self.setup.python, *arguments])

    def take_indexes_from_pip(self) -> None:
        """uv reads neither pip.conf nor PIP_*; a machine that reaches its packages through them has no other way."""
        command = [str(self.setup.python), "-m", "pip", "config", "list"]
        answer = tool_output(command, self.environment, self.setup.root)
        settings = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", answer.stdout, re.MULTILINE))
        for ours, theirs in (("index-url", "UV_DEFAULT_INDEX"), ("extra-index-url", "UV_INDEX")):
            if settings.get(ours):
                self.environment.setdefault(theirs, settings[ours])

    def run(self, step: str, command: Sequence[str | Path]) -> None:
        words = [str(word) for word in command]
        os.write(self.log_fd, f"\n== {step}: {' '.join(words)}\n".encode())
        start_offset = os.lseek(self.log_fd, 0, os.SEEK_END)
        with progress(step) as tick:
            with running(words, self) as process:
                while process.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.5)
                    tick()
            if process.returncode != 0:
                log_path = self.setup.venv / LOG
                output = log_path.read_bytes()[start_offset:].decode(errors="replace")
                if shutil.disk_usage(self.setup.venv).free < 2**24:  # the tool may have had no room to say so
                    output += os.strerror(errno.ENOSPC)
                raise SetupError(f"{step.partition(' (')[0]}: {explain(output)}; details in {log_path}")


@contextlib.contextmanager
def running(words: Sequence[str], tools: Tools) -> Iterator[subprocess.Popen[bytes]]:
    """Its own process group: on Ctrl-C we end it whole, compilers included, and leave nobody writing."""
    came: list[int] = []  # while it was being started, when nobody would know of it
    endings = [each for each in ENDINGS if signal.getsignal(each) is signal.default_int_handler]
    try:
        for ending in endings:
            signal.signal(ending, lambda number, _frame: came.append(number))
        process = subprocess.Popen(
            words,
            cwd=tools.setup.root,
            env=tools.environment,
            stdin=subprocess.DEVNULL,
            stdout=tools.log_fd,
            stderr=tools.log_fd,
            start_new_session=True,
        )
        try:
            raise_interrupts_at(endings)
            if came:
                raise KeyboardInterrupt
            yield process
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    finally:
        raise_interrupts_at(endings)


def raise_interrupts_at(endings: Sequence[signal.Signals]) -> None:
    """KeyboardInterrupt, when such a signal comes."""
    for ending in endings:
        signal.signal(ending, signal.default_int_handler)


def explain(output: str) -> str:
    """Name the fix for what a failed tool printed."""
    for pattern, fix in FIXES:
        if found := re.search(pattern, output, re.IGNORECASE):
            return fix.format(*found.groups())
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"caused by|error", line, re.IGNORECASE) and "non-zero" not in line]
    return f"failed ({(causes or lines or ['it said nothing'])[-1][:200]})"


OTHER_PACKAGE = "{0} is another file than requirements.lock names: find out which of the two was changed, and run again"
FIXES = (
    # uv's words, and pip's.
    (r"hash mismatch for `([^`]+)`", OTHER_PACKAGE),
    (r"do not match the hashes[^\0]*?\n\s+(\S+==\S+)", OTHER_PACKAGE),
    (r"no space left on device|disk quota exceeded|os error (28|122)\b", "the disk is full: make room and run again"),
    (r"python\.h: no such file", "Python's headers are missing: `apt install python3-dev` and run again"),
    (r"gmp\.h: no such file", "GMP's headers are missing: `apt install libgmp-dev` and run again"),
    (
        r"linker `\w+` not found|unable to find .*\bcc\b|command '(gcc|cc|clang)' failed|no c compiler",
        "a C compiler and linker are missing: `apt install build-essential` and run again",
    ),
    (
        r"dns error|failed to (lookup|resolve)|could not resolve|name resolution|name or service not known"
        r"|tcp connect error|error sending request|connection refused|network is unreachable|newconnectionerror"
        r"|timed out|no matching distribution found for (?:uv|setuptools)|spurious network error|certificate verify"
        r"|invalid peer certificate|failed to (fetch|download)",
        "packages cannot be reached: check the network (and proxy or certificate settings) and run again",
    ),
    (
        r"permission denied|read-only file system",
        "a file cannot be written: check the owner of the checkout and run again",
    ),
)


def explain_os_error(error: OSError, venv: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of {venv} is full: make room and run again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write {error.filename or venv}: check its owner, or name another place in LLMNODE_VENV"
    return f"set-up failed: {error}"


# Small edges


def tool_output(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, env=environment, cwd=folder, capture_output=True, text=True)


def read_toml(path: Path) -> dict[str, Any]:  # Any: a TOML document is
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} cannot be read ({error}): mend it and run again") from error


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


@contextlib.contextmanager
def progress(step: str) -> Iterator[Callable[[], None]]:
    """One line a step: on a terminal with running seconds, else when it begins and when it is done."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()

    def tick() -> None:
        if terminal:
            sys.stderr.write(f"\r\033[Kllmnode: {step} ... {time.monotonic() - started:.0f} s")
            sys.stderr.flush()

    if not terminal:
        say(f"{step} ...")
    tick()
    try:
        yield tick
    finally:
        if terminal:
            sys.stderr.write("\r\033[K")
    say(f"{step}: {time.monotonic() - started:.1f} s")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def say(line: str) -> None:
    """One line: it may quote a tool or a path, of which nothing is to steer the terminal."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    print(f"llmnode: {shown}", file=sys.stderr, flush=True)


def fail(line: str) -> int:
    say(line)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
