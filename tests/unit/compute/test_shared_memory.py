"""Memory of two processes: both see what one writes, it grows, and no file of it has a name."""

from __future__ import annotations

import os
import sys

import pytest

from llmnode.compute.shared import LEAST_BYTES, SharedMemory, make_shared_memory


@pytest.fixture(params=["linux", "darwin"])
def platform(request: pytest.FixtureRequest) -> str:
    """The system whose way to make it is taken; that of another system works here too."""
    name: str = request.param
    return name


@pytest.fixture
def ends(platform: str) -> tuple[SharedMemory, SharedMemory]:
    """Two descriptors of one file, as a parent and its child have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", platform)
        ours = make_shared_memory()
    return ours, SharedMemory(os.dup(ours.file))


def test_each_end_sees_what_the_other_writes_also_after_it_has_grown(ends: tuple[SharedMemory, SharedMemory]) -> None:
    ours, theirs = ends
    for size in (3, LEAST_BYTES, LEAST_BYTES + 1, 5 * LEAST_BYTES, 1):
        ours.grow(size)
        data = os.urandom(size)
        ours.view(size)[:] = data
        assert theirs.view(size) == data
        theirs.view(size)[0] ^= 255
        assert ours.view(size)[0] == data[0] ^ 255
    ours.close()
    theirs.close()


def test_a_view_outlives_growth_and_the_end(ends: tuple[SharedMemory, SharedMemory]) -> None:
    ours, theirs = ends
    ours.grow(4)
    view = ours.view(4)
    view[:] = b"kept"
    ours.grow(10 * LEAST_BYTES)
    assert ours.view(10 * LEAST_BYTES)[:4] == b"kept"
    ours.close()
    theirs.close()
    assert view == b"kept"
    assert ours.file == -1, "which is nobody's, and never another file's"


def test_nothing_is_reserved_before_something_is_to_be_held(ends: tuple[SharedMemory, SharedMemory]) -> None:
    for end in ends:
        assert len(end.view(0)) == 0
        found = os.fstat(end.file)
        assert found.st_size == 0
        assert found.st_nlink == 0, "it has no name"
        end.close()
