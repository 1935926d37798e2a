"""Where an option comes from when the command line leaves it out, on a program of two commands."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from llmnode.errors import ConfigError
from llmnode.node.cli import main
from llmnode.node.commands.options import Parser
from llmnode.node.settings import parse, settings_path, without_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Run = Callable[..., argparse.Namespace]


def _even(text: str) -> int:
    if int(text) % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd")
    return int(text)


def _program() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="bakery")
    commands = parser.add_subparsers(dest="command", required=True)
    bake = commands.add_parser("bake")
    bake.add_argument("dough", nargs="?")
    bake.add_argument("--loaves", type=int, default=1)
    bake.add_argument("--heat", type=float, default=200.0)
    bake.add_argument("--eggs", type=_even)
    bake.add_argument("--flour", choices=["rye", "wheat"], default="rye")
    bake.add_argument("--seed", action="append")
    bake.add_argument("--ovens", nargs="+", required=True)
    bake.add_argument("--steam-it", action="store_true")
    bake.add_argument("--cold", dest="warm", action="store_false")
    bake.add_argument("--glaze", action=argparse.BooleanOptionalAction, default=False)
    names = bake.add_mutually_exclusive_group()
    names.add_argument("--name", default="bread")
    names.add_argument("--names", nargs="+")
    sell = commands.add_parser("sell")
    sell.add_argument("shop")
    sell.add_argument("--loaves", type=int, default=10)
    pay = sell.add_mutually_exclusive_group(required=True)
    pay.add_argument("--cash", action="store_true")
    pay.add_argument("--card")
    return parser, commands.choices


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Parse a command line, given what the file says and what is in the environment."""

    def parsed(line: str, file: str = "", environ: Mapping[str, str] | None = None) -> argparse.Namespace:
        (tmp_path / "c.toml").write_text(file)
        return parse(*_program(), line.split(), {"LLMNODE_CONFIG": str(tmp_path / "c.toml"), **(environ or {})})

    return parsed


OVENS = "ovens = ['big']\n"


@pytest.mark.parametrize(
    ("line", "environ", "file", "loaves"),
    [
        ("bake", {}, "", 1),
        ("bake", {}, "loaves = 2", 2),
        ("bake", {}, "loaves = 2\n[bake]\nloaves = 3", 3),
        ("bake", {}, "[bake]\nloaves = 3\n[sell]\nloaves = 9", 3),
        ("bake", {"LLMNODE_LOAVES": "4"}, "loaves = 2\n[bake]\nloaves = 3", 4),
        ("bake", {"LLMNODE_LOAVES": ""}, "loaves = 2", 2),
        ("bake --loaves 5", {"LLMNODE_LOAVES": "4"}, "loaves = 2\n[bake]\nloaves = 3", 5),
        ("bake --loaves 1", {"LLMNODE_LOAVES": "4"}, "", 1),
        ("sell shop --cash", {}, "[bake]\nloaves = 3", 10),
        ("sell shop --cash", {}, "loaves = 2\nsteam-it = true", 2),
    ],
)
def test_the_nearest_source_counts(run: Run, line: str, environ: dict[str, str], file: str, loaves: int) -> None:
    assert run(line, OVENS + file, environ).loaves == loaves


def test_every_kind_of_option_may_come_from_the_file(run: Run) -> None:
    found = run(
        "bake",
        "dough = 'sour'\nloaves = 2\nheat = 180\neggs = 4\nflour = 'wheat'\nseed = ['a b', 'c']\novens = ['d', 'e']\n"
        "steam_it = true\ncold = true\nglaze = true\nname = 'roll'",
    )
    assert (found.dough, found.loaves, found.eggs, found.flour, found.name) == ("sour", 2, 4, "wheat", "roll")
    assert found.heat == 180.0 and isinstance(found.heat, float)
    assert (found.seed, found.ovens) == (["a b", "c"], ["d", "e"])
    assert (found.steam_it, found.warm, found.glaze) == (True, False, True)


def test_every_kind_of_option_may_come_from_the_environment(run: Run) -> None:
    environ = {
        "LLMNODE_DOUGH": "sour",
        "LLMNODE_LOAVES": "2",
        "LLMNODE_HEAT": "180",
        "LLMNODE_EGGS": "4",
        "LLMNODE_FLOUR": "wheat",
        "LLMNODE_SEED": "a b",
        "LLMNODE_OVENS": "d  e",
        "LLMNODE_STEAM_IT": "Yes",
        "LLMNODE_COLD": "0",
        "LLMNODE_GLAZE": "on",
        "LLMNODE_NAME": "a roll",
    }
    found = run("bake", "steam-it = false\ncold = true", environ)
    assert (found.dough, found.loaves, found.heat, found.eggs, found.flour) == ("sour", 2, 180.0, 4, "wheat")
    assert (found.seed, found.ovens, found.name) == (["a", "b"], ["d", "e"], "a roll")
    assert (found.steam_it, found.warm, found.glaze) == (True, True, True)


def test_the_command_line_replaces_every_kind_of_option(run: Run) -> None:
    found = run(
        "bake old --seed x --seed y --ovens z --no-steam-it --no-glaze --flour rye",
        "dough = 'sour'\nseed = ['a']\novens = ['d', 'e']\nsteam-it = true\nglaze = true\nflour = 'wheat'",
    )
    assert (found.dough, found.seed, found.ovens, found.flour) == ("old", ["x", "y"], ["z"], "rye")
    assert (found.steam_it, found.glaze) == (False, False)


def test_what_is_required_must_come_from_somewhere(run: Run) -> None:
    with pytest.raises(ConfigError, match="required: --ovens"):
        run("bake")
    assert run("bake", environ={"LLMNODE_OVENS": "a"}).ovens == ["a"]
    with pytest.raises(ConfigError, match="--cash --card is required"):
        run("sell shop")
    assert run("sell shop", "card = 'x'").card == "x"


@pytest.mark.parametrize(
    ("line", "environ", "file", "name", "names"),
    [
        ("bake", {}, "names = ['a']", "bread", ["a"]),
        ("bake --name roll", {}, "names = ['a']", "roll", None),
        ("bake --name roll", {"LLMNODE_NAMES": "a b"}, "", "roll", None),
        ("bake --names c", {}, "name = 'roll'", "bread", ["c"]),
        ("bake", {"LLMNODE_NAME": "roll"}, "names = ['a']", "roll", None),
    ],
)
def test_an_option_takes_what_it_excludes_out_of_lower_sources(
    run: Run, line: str, environ: dict[str, str], file: str, name: str, names: list[str] | None
) -> None:
    found = run(line, OVENS + file, environ)
    assert (found.name, found.names) == (name, names)


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("loafs = 2", "no command has the option 'loafs'; did you mean 'loaves'?"),
        ("shop = 'x'", "no command has the option 'shop'"),
        ("command = 'bake'", "no command has the option 'command'"),
        ("[baked]\nloaves = 2", "there is no command for the table 'baked'; did you mean 'bake'?"),
        ("[sell]\nheat = 2", "in [sell]: sell has no option 'heat'"),
        ("loaves = 'many'", "loaves = 'many': write a whole number"),
        ("loaves = '2'", "loaves = '2': write a whole number"),
        ("loaves = 2.5", "loaves = 2.5: write a whole number"),
        ("[bake]\nloaves = true", "loaves in [bake] = True: write a whole number"),
        ("heat = 'hot'", "heat = 'hot': write a number"),
        ("name = 5", "name = 5: write text in quotes"),
        ("dough = ['a']", "dough = ['a']: write text in quotes"),
        ("seed = 'a'", "seed = 'a': write a list"),
        ("seed = [1]", "seed = [1]: write text in quotes"),
        ("ovens = []", "ovens = []: give at least one"),
        ("steam-it = 1", "steam-it = 1: write true or false"),
        ("steam-it = 'yes'", "steam-it = 'yes': write true or false"),
        ("flour = 'oats'", "flour = 'oats': choose rye, wheat"),
        ("eggs = 3", "eggs = 3: 3 is odd"),
        ("eggs = 1979-05-27", "write text in quotes or a number"),
        ("loaves = = 2", "is not TOML: "),
    ],
)
def test_an_error_names_file_and_key(run: Run, tmp_path: Path, file: str, complaint: str) -> None:
    """And whichever command runs: `sell` here has few of these."""
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        run("sell shop --cash", file)
    assert str(raised.value).startswith(f"{tmp_path / 'c.toml'}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("LLMNODE_LOAVES", "many", "LLMNODE_LOAVES=many: write a whole number"),
        ("LLMNODE_STEAM_IT", "perhaps", "LLMNODE_STEAM_IT=perhaps: write true or false"),
        ("LLMNODE_FLOUR", "oats", "LLMNODE_FLOUR=oats: choose rye, wheat"),
        ("LLMNODE_OVENS", " ", "LLMNODE_OVENS= : give at least one"),
        ("LLMNODE_EGGS", "3", "LLMNODE_EGGS=3: 3 is odd"),
    ],
)
def test_an_error_names_the_variable(run: Run, variable: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run("bake", OVENS, {variable: text})
    assert str(raised.value) == complaint


def test_paths_may_have_variables_where_no_shell_has_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("LLMNODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/the/home")
    file = tmp_path / "my.toml"
    file.write_text("identity = '$HOME/id'\nmodel = '~/m'\nswarm-key = '~/key'\n[chat]\nmodel = 'org/name'\n")
    monkeypatch.setenv("LLMNODE_CONFIG", str(file))
    monkeypatch.setenv("LLMNODE_PROMPTS", "${HOME}/prompts")
    assert main(["config", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert commands["serve"]["identity"]["value"] == "/the/home/id"
    assert commands["serve"]["model"]["value"] == "/the/home/m"
    assert commands["chat"]["model"]["value"] == "org/name"
    assert commands["chat"]["swarm-key"]["value"] == "/the/home/key"
    assert commands["generate"]["prompts"]["value"] == "/the/home/prompts"
    monkeypatch.setenv("LLMNODE_PROMPTS", "$NOPE/x")
    assert main(["config"]) == 2
    assert "llmnode: LLMNODE_PROMPTS=$NOPE/x: the variable NOPE is not set" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_the_file_is_read_as_editors_save_it(run: Run, tmp_path: Path, encoding: str, end: str) -> None:
    (tmp_path / "w.toml").write_bytes(f"name = 'é\u2028'{end}[bake]{end}loaves = 3{end}".encode(encoding))
    found = run("bake --ovens a", environ={"LLMNODE_CONFIG": str(tmp_path / "w.toml")})
    assert (found.name, found.loaves) == ("é\u2028", 3)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"loaves = 2\nname = '\xe9'", ", line 2, byte 9: 0xe9 is no UTF-8: save it as UTF-8"),
        (b"loaves = 2\0", ", line 1, byte 11: a NUL, which no text has: save it as UTF-8"),
        (b"loaves = 0x" + b"f" * 5000, ": loaves = ...: write a whole number"),
        (b"loaves = " + b"9" * 5000, " is not TOML: "),
        (b"ovens = " + b"[" * 5000, " is not TOML: "),
        (b"#" * (1 << 20) + b"#", ": has more than 1048576 bytes"),
    ],
)
def test_a_file_of_any_bytes_is_refused_in_a_line(run: Run, tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "w.toml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        run("bake --ovens a", environ={"LLMNODE_CONFIG": str(tmp_path / "w.toml")})
    assert str(raised.value).startswith(f"{tmp_path / 'w.toml'}{complaint}")
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_refused_by_option(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"^--name: 0xff after 1 characters is no UTF-8: write it in UTF-8$"):
        run("bake --ovens a --name é\udcff")
    with pytest.raises(ConfigError, match=r"^--ovens: 0xff after 0 characters"):
        run("bake", environ={"LLMNODE_OVENS": "a \udcff"})
    assert run("bake --ovens a --name \udcc3\udca9").name == "é"


def test_help_may_be_a_value(run: Run) -> None:
    assert run("bake --ovens a -- --help").dough == "--help"


def test_where_the_file_is() -> None:
    home = {"XDG_CONFIG_HOME": "/settings"}
    assert str(settings_path(home)) == "/settings/llmnode/config.toml"
    assert str(settings_path({**home, "LLMNODE_CONFIG": "/mine.toml"})) == "/mine.toml"
    assert str(settings_path({**home, "LLMNODE_CONFIG": ""})) == "/settings/llmnode/config.toml"
    assert str(settings_path({})).endswith("/.config/llmnode/config.toml")


def test_only_the_file_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    assert parse(*_program(), ["bake", "--ovens", "a"], {"XDG_CONFIG_HOME": str(tmp_path)}).loaves == 1
    with pytest.raises(ConfigError, match=r"no\.toml is not there: write it, or unset LLMNODE_CONFIG"):
        parse(*_program(), ["bake", "--ovens", "a"], {"LLMNODE_CONFIG": str(tmp_path / "no.toml")})
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        parse(*_program(), ["bake", "--ovens", "a"], {"LLMNODE_CONFIG": str(tmp_path)})


def test_help_works_with_a_broken_file(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("bake --help", "loaves = = 2")
    assert "--ovens" in capsys.readouterr().out


def test_a_child_gets_no_settings_but_the_rest(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "LLMNODE_CACHE": "/c",
        "LLMNODE_LOAVES": "5",
        "LLMNODE_CONFIG": str(tmp_path / "no.toml"),
    }
    child = without_settings(environ)
    assert (child["PATH"], child["LLMNODE_CACHE"]) == ("/bin", "/c")
    assert parse(*_program(), ["bake", "--ovens", "a"], child).loaves == 1
