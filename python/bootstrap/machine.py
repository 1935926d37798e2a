"""The needs of set-up: what has to be on the machine already, and the environment that the tools run in."""

import importlib.util
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from bootstrap.environment import Setup
from bootstrap.messages import SetupError
from bootstrap.tools import tool_output

FULL_SETUP_GIB = 8.0  # PyTorch with CUDA unpacked, and its wheels in uv's cache when that is on the same disk
REBUILD_GIB = 0.5


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
            f"the disk of {venv} has {free_gib:.1f} GiB free and set-up needs {needed_gib:g}: free some space, "
            "or name a place on another disk in LLMNODE_VENV, and run again"
        )


def read_toml(path: Path) -> dict[str, Any]:  # Any: a TOML document is
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{path} cannot be read ({error}): mend it and run again") from error
