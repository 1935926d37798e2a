"""How a record of our log becomes text: one line, and a traceback below it that cannot be taken for other lines."""

from __future__ import annotations

import logging

from llmnode.core.texts.visible import printable, quoted


class LogLines(logging.Formatter):
    """The words of peers may be in a record: they neither end its line nor steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [printable(self.formatMessage(record))]
        if record.exc_info:
            lines.append(quoted(self.formatException(record.exc_info)))
        if record.stack_info:
            lines.append(quoted(self.formatStack(record.stack_info)))
        return "\n".join(lines)


def log_to(handler: logging.Handler, level: int, form: str) -> None:
    """All that our modules log from now on goes to `handler`, and nowhere else."""
    handler.setFormatter(LogLines(form))
    ours = logging.getLogger("llmnode")
    ours.handlers = [handler]
    ours.setLevel(level)
    # py-libp2p calls `logging.debug`, which gives the root logger a handler if it has none: it would print ours again.
    logging.getLogger().addHandler(logging.NullHandler())
