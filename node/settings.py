"""Options from elsewhere than the command line, which goes before them: the environment, then a file, then the default.

An option may be set by `LLMNODE_<OPTION>` or in a TOML file, whose keys at the top are for every command that has such
an option, and those in a table like `[serve]` for that command. The file is checked whole, whichever command runs. Does
not know what any option means.

Not ConfigArgParse (1.9.0 was tried), which pastes what it finds into the command line as text. So a wrong key or value
is told without the file it stands in, keys for several commands have no place, an optional positional like MODEL cannot
be set, LLMNODE_PEERS="A B" is one peer, and importing it changes argparse for the whole process.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmnode.core.user_input import (
    Unreadable,
    decode,
    find_no_text,
    home_folder,
    path_from,
    read_file,
    recover_text,
    split_lines,
)
from llmnode.errors import ConfigError
from llmnode.node.values import INVITE, PATHS, peer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    Options = Mapping[str, Mapping[str, "Option"]]  # by command and name
    Table = dict[str, Any]  # Any: what TOML can hold

FILE_VARIABLE = "LLMNODE_CONFIG"
_OTHERS = ("CACHE", "OFFLINE", "PYTHON", "SETUP_GIB", "TRUST_TOKENIZER", "VENV")
NO_OPTIONS = frozenset({FILE_VARIABLE} | {f"LLMNODE_{name}" for name in _OTHERS})
"""Variables that mean something else: no option may be given such a name."""
_MOST_BYTES = 1 << 20
"""The largest file."""

_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_FLAGS = (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse.BooleanOptionalAction)
_TEXT = (str,), "text in quotes"
_TYPES: Mapping[Any, tuple[tuple[type, ...], str]] = {  # Any: an option's conversion, which can be any callable
    None: _TEXT,
    str: _TEXT,
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    **dict.fromkeys([*PATHS, peer], _TEXT),
}
_ANY_TYPE = (str, int, float), "text in quotes or a number"  # for an option with a conversion of its own


@dataclass(frozen=True, slots=True)
class Option:
    """`name` is its key in a file; `rivals` are the names of those that exclude it."""

    name: str
    action: argparse.Action
    default: Any  # Any: of the option's own type, as the value of a setting
    rivals: frozenset[str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option without the command line. `source`: default, file or environment; `place`: its path or
    name.
    """

    value: Any
    source: str = "default"
    place: str = ""


def settings_path(environ: Mapping[str, str]) -> Path:
    """`$LLMNODE_CONFIG`, else `llmnode/config.toml` in the user's configuration folder, which need not exist.

    Raises ConfigError if there is no such path.
    """
    if (chosen := path_from(environ, FILE_VARIABLE)) is not None:
        return chosen
    return home_folder(environ, "XDG_CONFIG_HOME", ".config") / "llmnode" / "config.toml"


def variable_of(option: str) -> str:
    return f"LLMNODE_{option.replace('-', '_').upper()}"


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child that is told all on its command line, whatever the user has set for their own commands.

    Others of the network do not find it.
    """
    kept = {key: value for key, value in environ.items() if not key.startswith("LLMNODE_") or key in NO_OPTIONS}
    return {**kept, FILE_VARIABLE: "/dev/null", variable_of("mdns"): "no"}


def parse(
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> argparse.Namespace:
    """Parse `argv`, with settings for the options that it leaves out; `commands` are the subparsers, by `command`.

    The result's `settings` are those of all commands, and its `given` are the options in `argv`, by `dest`.
    `--no-OPTION` undoes a yes of the settings. `parser` cannot be used again. Raises ConfigError, which names the file
    and key, or the variable.
    """
    if {"-h", "--help", "--version"} & set(argv):  # they must work with a broken file
        parser.parse_args(argv)  # which ends the program, unless that is some option's value
    options = {command: options_of(of) for command, of in commands.items()}
    settings = read_settings(options, environ)
    required: dict[str, list[argparse.Action]] = {}
    for command, of in commands.items():
        _leave_out_rest(of, options[command], settings[command])
        required[command] = _take_required(of)
    arguments, left = parser.parse_known_args(argv)
    chosen, given = arguments.command, set(vars(arguments))
    if left:
        commands[chosen].error(f"unrecognized arguments: {' '.join(left)}{_hint(left[0], options[chosen])}")
    if missing := [each for each in required[chosen] if each.dest not in given]:
        names = ", ".join("/".join(each.option_strings) or str(each.metavar or each.dest) for each in missing)
        commands[chosen].error(f"the following arguments are required: {names}")
    assert not given & {"settings", "given"}, "they would be lost below"
    for option in options[chosen].values():
        if option.action.dest not in given:
            outdone = any(options[chosen][rival].action.dest in given for rival in option.rivals)
            setattr(arguments, option.action.dest, option.default if outdone else settings[chosen][option.name].value)
        setattr(arguments, option.action.dest, _as_text(option, getattr(arguments, option.action.dest)))
    arguments.settings, arguments.given = settings, frozenset(given)
    return arguments


def read_settings(options: Options, environ: Mapping[str, str]) -> dict[str, dict[str, Setting]]:
    """By command and option. Raises ConfigError."""
    path = settings_path(environ)
    common, tables = _split(path, _read(path, must_exist=bool(environ.get(FILE_VARIABLE))), options)
    settings: dict[str, dict[str, Setting]] = {}
    for command, of in options.items():
        layers: dict[str, dict[str, Setting]] = {"file": {}, "environment": {}}
        for section, table in (("", common), (f" in [{command}]", tables.get(command, {}))):
            for name in table.keys() & of.keys():
                value = _from_toml(of[name].action, table[name], f"{path}: {name}{section}", environ)
                layers["file"][name] = Setting(value, "file", str(path))
        for name, option in of.items():
            if text := environ.get(variable := variable_of(name)):
                value = _from_text(option.action, text, variable, environ)
                layers["environment"][name] = Setting(value, "environment", variable)
        for name in [name for name in layers["file"] if of[name].rivals & layers["environment"].keys()]:
            del layers["file"][name]
        defaults = {name: Setting(option.default) for name, option in of.items()}
        settings[command] = defaults | layers["file"] | layers["environment"]
    return settings


def options_of(parser: argparse.ArgumentParser) -> dict[str, Option]:
    """The options that can be set: those of a value, a list or a yes, and a positional that may be left out."""
    named = {
        next((flag[2:] for flag in action.option_strings if flag.startswith("--")), action.dest): action
        for action in parser._actions
        if isinstance(action, (*_FLAGS, argparse._StoreAction, argparse._AppendAction))
        and (action.option_strings or action.nargs == "?")
    }
    exclusive = [set(map(id, group._group_actions)) for group in parser._mutually_exclusive_groups]
    return {
        name: Option(
            name,
            action,
            action.default,
            frozenset(
                rival
                for rival, other in named.items()
                if other is not action and any({id(action), id(other)} <= group for group in exclusive)
            ),
        )
        for name, action in named.items()
    }


def _leave_out_rest(
    parser: argparse.ArgumentParser, options: Mapping[str, Option], found: Mapping[str, Setting]
) -> None:
    """Make `parser` take what is on the command line: no default, and no offence at what is set elsewhere."""
    set_elsewhere = {option.action.dest for option in options.values() if found[option.name].source != "default"}
    for group in parser._mutually_exclusive_groups:
        group.required = group.required and not set_elsewhere & {action.dest for action in group._group_actions}
    for option in options.values():
        action, undo = option.action, f"--no-{option.name}"
        action.default = argparse.SUPPRESS
        action.required = action.required and action.dest not in set_elsewhere
        if isinstance(action, argparse._StoreTrueAction) and undo not in parser._option_string_actions:
            parser.add_argument(undo, dest=action.dest, action="store_const", const=False, default=argparse.SUPPRESS)


def _take_required(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Make `parser` not ask for what is required, and return that: a misspelt argument is to be told first."""
    may_be_empty = (argparse.OPTIONAL, argparse.ZERO_OR_MORE, argparse.REMAINDER)
    required = [action for action in parser._actions if action.required and action.nargs not in may_be_empty]
    for action in required:
        action.required, action.default = False, argparse.SUPPRESS
    return required


def _read(path: Path, *, must_exist: bool) -> Table:
    try:
        content = read_file(path, str(path), _MOST_BYTES, fix=f"name another in {FILE_VARIABLE}")
    except Unreadable as error:
        if not error.is_missing:
            raise
        if must_exist:
            raise ConfigError(f"{path} is not there: write it, or unset {FILE_VARIABLE}, which names it") from error
        return {}
    text = "\n".join(split_lines(decode(content, str(path))))
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: lists in lists without end
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _split(path: Path, whole: Table, options: Options) -> tuple[Table, dict[str, Table]]:
    """The settings for all commands, and those for each. Raises ConfigError for unknown names."""
    tables = {key: _as_written(value) for key, value in whole.items() if isinstance(value, dict)}
    common = _as_written({key: value for key, value in whole.items() if key not in tables})
    _check_known(common, {name for of in options.values() for name in of}, f"{path}: no command has the option")
    _check_known(tables, options.keys(), f"{path}: there is no command for the table")
    for command, table in tables.items():
        _check_known(table, options[command].keys(), f"{path}: in [{command}]: {command} has no option")
    return common, tables


def _as_written(table: Table) -> Table:
    return {key.replace("_", "-"): value for key, value in table.items()}


def _check_known(names: Iterable[str], known: Collection[str], complaint: str) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"{complaint} {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))


def _hint(argument: str, known: Mapping[str, Option]) -> str:
    """How an `argument` may have been meant that the command has no place for."""
    if argument.startswith("--"):
        close = difflib.get_close_matches(argument.partition("=")[0], [f"--{name}" for name in known], n=1)
        return f"; did you mean {close[0]}?" if close else ""
    if argument.startswith(INVITE) and "swarm-key" in known:
        return "; an INVITE beside another argument goes after --swarm-key"
    if argument.startswith("/") and "/p2p/" in argument and "peers" in known:
        return "; addresses go after --peers"
    return ""


def _as_text(option: Option, value: Any) -> Any:
    """Raises ConfigError for bytes that are no text. In paths they may be: those are no `str`."""
    if isinstance(value, list):
        return [_as_text(option, each) for each in value]
    if not isinstance(value, str):
        return value
    text = recover_text(value)
    if byte := find_no_text(text):
        raise ConfigError(f"{'--' * bool(option.action.option_strings)}{option.name}: {byte}: write it in UTF-8")
    return text


def _from_toml(action: argparse.Action, value: Any, place: str, environ: Mapping[str, str]) -> Any:
    try:
        where = f"{place} = {value!r}"
    except (ValueError, RecursionError):  # a number of more digits than Python prints; lists in lists
        where = f"{place} = ..."
    if isinstance(action, _FLAGS):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: write true or false")
        return value is not isinstance(action, argparse._StoreFalseAction)
    values = value if _is_list(action) else [value]
    if not isinstance(values, list):
        raise ConfigError(f"{where}: write a list")
    accepted, expected = _TYPES.get(action.type, _ANY_TYPE)
    for each in values:
        if not isinstance(each, accepted):
            raise ConfigError(f"{where}: write {expected}")
    return _converted(action, values, where, environ)


def _from_text(action: argparse.Action, text: str, variable: str, environ: Mapping[str, str]) -> Any:
    where = f"{variable}={text}"
    if isinstance(action, _FLAGS):
        if (flag := _WORDS.get(text.lower())) is None:
            raise ConfigError(f"{where}: write true or false")
        return flag is not isinstance(action, argparse._StoreFalseAction)
    return _converted(action, text.split() if _is_list(action) else [text], where, environ)


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction) or action.nargs not in (None, "?")


def _converted(action: argparse.Action, given: Sequence[Any], where: str, environ: Mapping[str, str]) -> Any:
    convert: Any = action.type or str  # Any: it may return anything
    more = (environ,) if convert in PATHS else ()
    try:
        values = [convert(str(each), *more) for each in given]
    except (TypeError, ValueError, argparse.ArgumentTypeError, ConfigError) as error:
        raise ConfigError(f"{where}: {f'write {_TYPES[convert][1]}' if convert in (int, float) else error}") from error
    for value in values:
        if action.choices is not None and value not in action.choices:
            raise ConfigError(f"{where}: choose {', '.join(map(str, action.choices))}")
    if not values and action.nargs == "+":
        raise ConfigError(f"{where}: give at least one")
    return values if _is_list(action) else values[0]
