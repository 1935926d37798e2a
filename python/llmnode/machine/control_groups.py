"""Linux's control groups that this process is in, which a container's limits are those of. Elsewhere there are none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNIFIED = Path("sys/fs/cgroup")


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, bool]]:
    """The folders of the groups that may limit a `controller` (such as memory), and whether they are of version 2.

    This process's own group is among them. `root` is where Linux's own folders are.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / (_UNIFIED / controller if controllers else _UNIFIED)
        folder = mount / group.lstrip("/")
        # A container may see its own group as the mount, and yet be told its path outside: that is then not there.
        for each in (folder, *folder.parents):
            if each.is_relative_to(mount):
                yield each, not controllers


def read(file: Path) -> str:
    """Empty if it is not there, as on other systems."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
