"""Whether a path leads to a folder that nobody else may write: neither the folder, nor any folder or link on its way.

The rules are those of OpenSSH for its own files: the user and root are trusted, and nobody else. In a folder with the
sticky bit (`/tmp`) others may write, but may not replace what is ours. The user's private group, which many systems
make, has no other member, so its right to write counts for nothing. Access control lists show in the group's rights.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

MOST_LINKS = 40
"""Linux follows this many in one path."""


def find_stranger(path: Path) -> str:
    """Names another user that could change what is at `path`, and the folder, in a few words; "" if there is none.

    A part of the path that is not there yet is left out: the folder that will hold it counts.
    """
    links = 0
    at, parts = Path("/"), list(Path(os.path.abspath(os.curdir), path).parts[1:])
    while True:
        try:
            found = at.lstat()
        except OSError:  # it is not there, or cannot be looked at: then nothing is read or written there either
            return _stranger(at.parent, is_last=False)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MOST_LINKS:
                return f"{path} leads through more than {MOST_LINKS} links"
            if found.st_uid not in _trusted():
                return f"the link {at} belongs to {_name(found.st_uid)}"
            target = Path(os.readlink(at))
            parts = [*target.parts, *parts] if not target.is_absolute() else [*target.parts[1:], *parts]
            at = Path("/") if target.is_absolute() else at.parent
        elif why := _stranger(at, is_last=not parts):
            return why
        if not parts:
            return ""
        part = parts.pop(0)
        at = at.parent if part == os.pardir else at / part


def _stranger(folder: Path, *, is_last: bool) -> str:
    try:
        found = folder.lstat()
    except OSError:
        return ""
    if found.st_uid not in _trusted():
        return f"{folder} belongs to {_name(found.st_uid)}"
    is_shared = found.st_mode & stat.S_ISVTX and not is_last
    if found.st_mode & stat.S_IWOTH and not is_shared:
        return f"{folder} may be written by everybody"
    if found.st_mode & stat.S_IWGRP and not is_shared and not _is_private(found.st_gid):
        return f"{folder} may be written by the group {_group(found.st_gid)}"
    return ""


@cache
def _trusted() -> frozenset[int]:
    """In a user namespace root may be no user of it: then what belongs to nobody is the system's."""
    mapped, overflow = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
    with suppress(OSError, ValueError):
        if not any(int(line.split()[1]) == 0 for line in mapped.read_text().splitlines()):
            return frozenset({0, os.geteuid(), int(overflow.read_text())})
    return frozenset({0, os.geteuid()})


def _is_private(group: int) -> bool:
    """Whether it is the group that was made for this user alone."""
    with suppress(KeyError):
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
    return False


def _name(user: int) -> str:
    with suppress(KeyError):
        return f"the user {pwd.getpwuid(user).pw_name}"
    return f"the user {user}"


def _group(group: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(group).gr_name
    return str(group)
