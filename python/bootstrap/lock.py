"""The packages of a lock, and how they are installed: none without a hash."""

import re

LOCKED = ("--require-hashes", "--no-deps", "--no-build-isolation", "--requirement")
"""Nothing is installed that has no hash in the lock, and nothing is fetched to build a package with."""
INSTALLERS = ("uv", "setuptools")
"""They come first. Two packages have no wheels, and are built by setuptools."""
FROM_PYTORCH = re.compile("torch|triton|(cuda|nvidia)-.*")


def locked(text: str) -> list[tuple[str, str]]:
    """The packages of a lock by name, each as the lines that it is there: version, where it applies, hashes."""
    blocks = re.findall(r"^\S+==.*\n(?:[ ].*\n)*", text, re.MULTILINE)
    return [(block.partition("==")[0], block) for block in blocks]
