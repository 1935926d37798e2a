"""The root of all errors, and the kinds that the core raises. All other code imports them from `llmnode.errors`."""

from __future__ import annotations


class LlmnodeError(Exception):
    """The root of all errors that llmnode raises on purpose."""


class ConfigError(LlmnodeError):
    """A flag, file or argument is wrong; the message says how to put it right."""


class LocalProtocolError(LlmnodeError):
    """We broke our own protocol. A bug: do not catch it."""


class SwarmError(LlmnodeError):
    """The swarm as a whole cannot do what was asked."""
