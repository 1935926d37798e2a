"""The one way to the hub's network: it says when it is open, and explains its failures to the user.

Libraries ask the hub for files as they load a model. None of ours may: we look only for models that the user has named
on the hub. So the program switches huggingface_hub off (`keep_libraries_offline`, before anything is imported), and
`hub_access` switches it on while we ask for files of that model. `LLMNODE_OFFLINE=1`, or a `HF_HUB_OFFLINE=1` of the
user, keeps it off: then the cache must have everything.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager
from json import JSONDecodeError
from typing import TYPE_CHECKING

from llmnode.core.user_input import is_yes
from llmnode.errors import ConfigError, LlmnodeError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = "LLMNODE_OFFLINE"
_LIBRARIES = "HF_HUB_OFFLINE"
_SWITCH = threading.RLock()
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


def keep_libraries_offline() -> None:
    """Switch libraries off for this process and its children. `LLMNODE_OFFLINE` keeps the user's own wish.

    Call it before huggingface_hub is imported, which reads its variables then.
    """
    wish = os.environ.get(_LIBRARIES) or os.environ.get("TRANSFORMERS_OFFLINE") or "0"
    os.environ.setdefault(_OURS, wish)
    os.environ.setdefault(_LIBRARIES, "1")


def is_offline() -> bool:
    """Whether the user wants the hub to be left alone. Do not ask within `hub_access`."""
    from huggingface_hub import constants

    wish = os.environ.get(_OURS)
    return constants.HF_HUB_OFFLINE if wish is None else is_yes(wish)


@contextmanager
def hub_access(model: str) -> Iterator[None]:
    """Within it huggingface_hub may use the network, for `model`, unless the user is offline.

    Its errors, and those of network and disk, leave it as a ConfigError or ModelError of one line.
    """
    import httpx2
    from huggingface_hub import constants, errors

    with _SWITCH:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = is_offline()
        try:
            yield
        except (
            errors.SafetensorsParsingError,
            errors.OfflineModeIsEnabled,
            errors.EntryNotFoundError,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            JSONDecodeError,
            OSError,
        ) as error:
            raise explain(error, model) from error
        finally:
            constants.HF_HUB_OFFLINE = before


def is_out_of_reach(error: Exception) -> bool:
    """Whether the hub did not answer, or cannot now. Then the cache may be enough."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, httpx2.TransportError) or (
        isinstance(error, HfHubHTTPError) and error.response.status_code >= 500
    )


def explain(error: BaseException, model: str) -> LlmnodeError:
    """The meaning of `error` for the user, with advice. It came while a file of `model` was asked for."""
    from huggingface_hub import constants, errors

    match error:
        case errors.LocalEntryNotFoundError() if error.__cause__ is not None:
            return explain(error.__cause__, model)
        case errors.GatedRepoError():
            return ConfigError(
                f"{model} is gated: ask for access at {constants.ENDPOINT}/{model.partition('@')[0]}, "
                "then run `hf auth login` or set HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return ConfigError(f"there is no revision of that name in {model}: give a branch, a tag or a commit of it")
        case errors.RepositoryNotFoundError():
            return ConfigError(
                f"the hub has no model {model}, or it is private, and there is no such folder or file here: check the "
                "name, or run `hf auth login` or set HF_TOKEN to a token that may read it"
            )
        case errors.DisabledRepoError():
            return ConfigError(f"the hub has disabled {model}: choose another model")
        case errors.EntryNotFoundError():
            return ModelError(f"{model} lacks a file that a model must have ({_short(error)}): choose another model")
        case errors.SafetensorsParsingError():
            return ModelError(f"{model} holds no readable safetensors ({_short(error)}): choose another revision")
        case errors.HfHubHTTPError():
            return _explain_status(error.response.status_code, model)
        case errors.FileMetadataError() | JSONDecodeError():
            return ConfigError(
                f"{constants.ENDPOINT} does not answer as a hub does: check HF_ENDPOINT and the proxy's settings"
            )
        case OSError() if error.errno is not None:
            return _explain_disk(error, model)
    return ConfigError(
        f"cannot reach {constants.ENDPOINT} for {model} ({_short(error)}): check the network and run again, "
        "or name a folder that holds it"
    )


def _explain_status(status: int, model: str) -> LlmnodeError:
    if status in (401, 403):
        return ConfigError(
            f"the hub refuses {model} to this token ({status}): run `hf auth login` or set HF_TOKEN to one that may "
            "read it"
        )
    when = "later, or with a token (`hf auth login`)" if status == 429 else "later"
    return ConfigError(f"the hub answered {status} when asked for {model}: run again {when}")


def _explain_disk(error: OSError, model: str) -> LlmnodeError:
    from huggingface_hub import constants

    if error.errno in _DISK_FULL:
        return ConfigError(
            f"the disk is full, and {model} is not all there: free some space, or set HF_HUB_CACHE to another disk, "
            f"and run again (now {constants.HF_HUB_CACHE})"
        )
    return ConfigError(
        f"cannot keep {model} in {constants.HF_HUB_CACHE} ({error.strerror}): set HF_HUB_CACHE to another folder"
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
