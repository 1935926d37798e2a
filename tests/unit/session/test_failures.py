"""After failures, a step asks some peers again and others not."""

from __future__ import annotations

from llmnode.core.ids import PeerId
from llmnode.errors import PeerError, PeerRefused, PeerTimeout
from llmnode.session.failures import StepFailures

SILENT, FULL = PeerId("silent"), PeerId("full")


class Reports:
    """Takes the place of a finder: a step tells it of each failure."""

    def report(self, _error: PeerError) -> None: ...


def test_a_peer_that_was_silent_is_asked_again_after_all_others() -> None:
    failures, finder = StepFailures(), Reports()
    failures.note(PeerTimeout("no RESULT", peer=SILENT), finder)  # type: ignore[arg-type]
    for _ in range(3):
        failures.note(PeerRefused("no-room", "full", peer=FULL), finder)  # type: ignore[arg-type]
        assert failures.avoided(hurry=True) == {SILENT, FULL}
        failures.ask_all_again()
        assert failures.avoided(hurry=True) == {SILENT}
    failures.ask_all_again()
    assert not failures.avoided(hurry=True), "there is nobody else"
