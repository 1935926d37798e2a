"""Set-up tells the user one line at a time, and for each failure the fix."""

import errno
import re
import sys
from pathlib import Path


class SetupError(Exception):
    """One line for the user: what is wrong, and how to mend it."""


def say(line: str) -> None:
    """One line: it may quote a tool or a path, of which nothing is to steer the terminal."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    print(f"llmnode: {shown}", file=sys.stderr, flush=True)


def fail(line: str) -> int:
    say(line)
    return 2


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
    (
        r"no space left on device|disk quota exceeded|os error (28|122)\b",
        "the disk is full: free some space and run again",
    ),
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
        return f"the disk of {venv} is full: free some space and run again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"cannot write {error.filename or venv}: check its owner, or name another place in LLMNODE_VENV"
    return f"set-up failed: {error}"
