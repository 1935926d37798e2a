"""A process that renders chat templates, which might never end. `chat_template.py` says why, and ends it.

It is asked in lines of JSON on its standard input and answers in lines of JSON. It has no state: no
template sees anything of the one before.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READY = "ready"
MOST_CHARS = 1 << 22
"""The most characters of a template, and of a prompt: more than fits the longest context."""
_MESSAGE_CHARS = 300
"""The longest message of a template's own, in characters."""
_MORE_BYTES = 512 << 20
"""The memory that a template may take beyond that of Python and transformers."""

_LAST_S = 60.0
"""Then it ends by itself, for example when the asking process is gone and cannot end it."""


class TemplateFailed(LlmnodeError):
    """A chat template makes no prompt. The message is the end of a sentence that begins with its name."""


def render(source: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]) -> str:
    """The same as transformers' `apply_chat_template`. Raises TemplateFailed."""
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered = render_jinja_template(
            conversations=[[dict(each) for each in messages]],
            chat_template=source,
            add_generation_prompt=True,
            **special_tokens,
        )
        text = str(rendered[0][0])  # rendered[1] marks the answers
    except TemplateSyntaxError as error:
        raise TemplateFailed(f"has an error in line {error.lineno}: {_message(error)}") from error
    except UndefinedError as error:
        raise TemplateFailed(f"uses a variable that is not defined: {_message(error)}") from error
    except SecurityError as error:
        raise TemplateFailed(f"does what no template may: {_message(error)}") from error
    except TemplateError as error:  # as its `raise_exception` has it
        raise TemplateFailed(f"refuses this dialogue: {_message(error)}") from error
    except MemoryError as error:
        raise TemplateFailed(f"takes more than {_MORE_BYTES >> 20} MiB of memory") from error
    except Exception as error:  # it is a program: any kind
        raise TemplateFailed(f"fails: {type(error).__name__}: {_message(error)}") from error
    if len(text) > MOST_CHARS:
        raise TemplateFailed(f"makes a prompt of {len(text)} characters")
    return text


def _message(error: Exception) -> str:
    message = "".join(char for char in " ".join(str(error).split()) if char.isprintable()).rstrip(".")
    return message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}..."


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there, and stdout is for answers
    import transformers.utils.chat_template_utils  # noqa: F401 - before memory is limited, and before READY is sent

    _limit_memory()
    print(json.dumps(READY), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        faulthandler.dump_traceback_later(_LAST_S, exit=True)
        try:
            answer = {"text": render(asked["source"], asked["messages"], asked["tokens"])}
        except TemplateFailed as failed:
            answer = {"failed": str(failed)}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers, flush=True)


def _limit_memory() -> None:
    """Where the system can; elsewhere the deadline is all there is."""
    import psutil

    with suppress(ImportError, OSError, ValueError):
        import resource

        most = psutil.Process().memory_info().vms + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
