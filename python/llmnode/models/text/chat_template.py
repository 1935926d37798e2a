"""A model's chat template, which is a program: rendered so that it ends, whatever it says.

transformers' sandbox keeps a template from files and from Python, not from the machine: it can loop for hours, or
double a string until memory is full. No thread can be made to stop doing that. So templates are rendered in a process
of their own (`template_process.py`), which is ended at a deadline. The plain ones, which can do neither, are rendered
here: that spares the second that the process takes to start. Both are transformers' own `render_jinja_template`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError, nodes

from llmnode.models.text.template_process import MOST_CHARS, READY, TemplateFailed, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RENDER_S = 5.0
"""Templates take milliseconds for the longest of dialogues."""
_START_S = 120.0
"""It imports transformers: a second, or several on a machine that is busy."""
_PLAIN_LETTERS = 1 << 16
"""Longer templates are not even looked at here: those of models have a tenth of it."""
_COMMAND = (sys.executable, "-P", "-m", "llmnode.models.text.template_process")


class ChatTemplate:
    """Several threads may use it. The process, if there is one, ends with the template or with the program."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: _Process | None = None
        self._turn = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]) -> str:
        """The prompt for the next answer. Raises TemplateFailed, whose words go on after "the chat template"."""
        if len(self._source) > MOST_CHARS:
            raise TemplateFailed(f"is longer than {MOST_CHARS} characters")
        if self._is_plain:
            text = render(self._source, messages, special_tokens)
        else:
            text = self._render_outside({"source": self._source, "messages": messages, "tokens": special_tokens})
        if not text:
            raise TemplateFailed("gives no text for this dialogue")
        return text

    @cached_property
    def _is_plain(self) -> bool:
        return len(self._source) <= _PLAIN_LETTERS and is_plain(self._source)

    def _render_outside(self, asked: Mapping[str, Any]) -> str:
        with self._turn:
            if self._process is None or not self._process.is_there:
                self._process = _Process()
                weakref.finalize(self, self._process.end)
            return self._process.render(asked)


class _Process:
    """One life of `template_process.py`. Any fault ends it: a later answer would be out of turn."""

    def __init__(self) -> None:
        """Raises TemplateFailed."""
        path = os.pathsep.join(each or os.curdir for each in sys.path)  # it finds llmnode where we do
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,  # it ends when this does
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a Ctrl-C in the terminal is ours alone
            )
        except OSError as error:
            raise TemplateFailed(f"needs a process of its own, and none can be started ({error})") from error
        if self._answer(_START_S) != READY:
            raise TemplateFailed("needs a process of its own, and that does not start")

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def render(self, asked: Mapping[str, Any]) -> str:
        """Raises TemplateFailed."""
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has just ended, which its answer tells
            self.end()
        answer = self._answer(RENDER_S)
        if answer is None:
            raise TemplateFailed(f"does not end within {RENDER_S:g} s, or takes too much memory")
        if "failed" in answer:
            raise TemplateFailed(answer["failed"])
        return str(answer["text"])

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()

    def _answer(self, patience_s: float) -> Any:  # Any: JSON
        """None if it has ended, or been ended as that took too long."""
        assert self._process.stdout is not None, "a pipe"
        deadline = threading.Timer(patience_s, self._process.kill)
        deadline.start()
        try:
            line = self._process.stdout.readline()
        except BaseException:
            self.end()
            raise
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            self.end()
            return None
        return json.loads(line)


_PLAIN = (
    *(nodes.TemplateData, nodes.Output, nodes.If, nodes.CondExpr, nodes.Break, nodes.Continue),
    *(nodes.Const, nodes.Name, nodes.Tuple, nodes.List, nodes.Keyword),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Neg, nodes.Not, nodes.And, nodes.Or),
    *(nodes.Compare, nodes.Operand, nodes.Test, nodes.Add, nodes.Concat),
)
"""No dict: one could have a method under another one's name."""
_KEPT = {"loop", "messages", "raise_exception"}
"""Names that must have the meaning that transformers gives them."""
_PLAIN_FILTERS = {"capitalize", "first", "last", "length", "lower", "string", "title", "trim", "upper"}
_PLAIN_METHODS = {"endswith", "get", "items", "lower", "lstrip", "rstrip", "startswith", "strip", "title", "upper"}


def is_plain(source: str) -> bool:
    """Whether a template only joins its inputs: it loops over the messages, and no loop is in another.

    Its work and its text then grow with the dialogue times the template, and no value is more than the sum of others:
    nothing is multiplied, padded or formatted, and no variable is made of two earlier ones.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        assigns = tree.find_all(nodes.Assign)
        made = [(each.target, each.node) for each in assigns]
        names = {name for target, _ in made for name in _names(target)}
        of_others = {name for target, value in made if not _is_messages(value, set()) for name in _names(target)}
        of_others |= {name for each in tree.find_all(nodes.For) for name in _names(each.target)}
        if of_others & _KEPT:
            return False
        return all(_is_plain_node(node, names, names - of_others) for node in tree.find_all(nodes.Node))
    except (TemplateSyntaxError, RecursionError):  # which the process will say
        return False


def _is_plain_node(node: nodes.Node, made: set[str], of_messages: set[str]) -> bool:
    match node:
        case nodes.For():
            is_nested = any(_within(each, nodes.For) for each in (*node.body, *node.else_))
            return not node.recursive and not is_nested and _is_messages(node.iter, of_messages)
        case nodes.Assign():
            used = [name for name in _names(node.node) if name in made]
            escapes = _within(node.node, nodes.List, nodes.Tuple)  # a list as text escapes its items
            return isinstance(node.target, nodes.Name) and len(used) <= 1 and not escapes
        case nodes.Filter():
            return node.name in _PLAIN_FILTERS and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        case nodes.Call():
            called = node.node
            is_method = isinstance(called, nodes.Getattr) and called.attr in _PLAIN_METHODS
            return is_method or (isinstance(called, nodes.Name) and called.name == "raise_exception")
        case nodes.Mod():  # of other things it may be a format
            left = node.left
            return isinstance(left, nodes.Getattr) and isinstance(left.node, nodes.Name) and left.node.name == "loop"
    return isinstance(node, _PLAIN)


def _is_messages(node: nodes.Node, also: set[str]) -> bool:
    """The messages or some of them, perhaps by a name of `also`."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_messages(node.node, also)
    return isinstance(node, nodes.Name) and node.name in {"messages", *also}


def _names(node: nodes.Node) -> list[str]:
    return [each.name for each in _within(node, nodes.Name) if isinstance(each, nodes.Name)]


def _within(node: nodes.Node, *kinds: type[nodes.Node]) -> list[nodes.Node]:
    """All nodes of these kinds, `node` too."""
    return [each for each in (node, *node.find_all(nodes.Node)) if isinstance(each, kinds)]
