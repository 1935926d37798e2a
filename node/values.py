"""Kinds of values that options have, beside text and numbers: what `argparse` calls a type."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.user_input import expand_path
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INVITE = "llmnode-invite-"


def path(text: str, variables: Mapping[str, str] | None = None) -> Path:
    """A path as a shell would give it: see `expand_path`. A shell has put in `variables` on a command line already."""
    try:
        return expand_path(text, variables)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def model(text: str, variables: Mapping[str, str] | None = None) -> str:
    """The path or the name of a model."""
    as_path = str(path(text, variables))
    return as_path if text.startswith("~") or (variables is not None and "$" in text) else text


def swarm_key(text: str, variables: Mapping[str, str] | None = None) -> str | Path:
    """An invite, or the path of a file."""
    return text.strip() if text.strip().startswith(INVITE) else path(text, variables)


def peer(text: str) -> PeerId:
    """The id of a peer, or of the peer at an address that ends in its id."""
    from llmnode.net.addresses import parse_peer, parse_peer_id

    try:
        return PeerId(str(parse_peer(text).peer_id)) if text.startswith("/") else parse_peer_id(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


PATHS = (path, model, swarm_key)
"""Those that the environment and files may write with variables in them."""
