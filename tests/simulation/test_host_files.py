"""Hosts and traces in files of a user: they are read as written, and an error names the line and what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llmnode.errors import ConfigError
from llmnode.testing.placement import Uptime, read_hosts, read_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trace_may_have_speeds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("host,from_s,to_s,tokens_per_s,blocks\na,0,100,7.5,2\n\nb,50,60,,\na,200,300,7.5,2\na,400,500,,\n")
    first, second = read_trace(trace)
    assert first.uptimes == [Uptime(0.0, 100.0), Uptime(200.0, 300.0), Uptime(400.0, 500.0)]
    assert first.speeds == (7.5, 7.5)
    assert second.uptimes == [Uptime(50.0, 60.0)]
    assert second.speeds, "they are drawn"


def test_hosts_have_the_speeds_of_a_trace(tmp_path: Path) -> None:
    hosts, trace = tmp_path / "hosts.csv", tmp_path / "trace.csv"
    hosts.write_bytes("\ufeffblocks, host, tokens_per_s\r\n3, a, 4\r\n1, é, 0.5\r\n".encode())
    trace.write_text("host,from_s,to_s\né,0,1\n")
    speeds = read_hosts(hosts)
    assert speeds == {"a": (4.0, 4.0, 4.0), "é": (0.5,)}
    (host,) = read_trace(trace, speeds=speeds)
    assert (host.peer, host.speeds) == ("é", (0.5,))


HOSTS, TRACE = "host,tokens_per_s,blocks\n", "host,from_s,to_s\n"


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        ("", ": has no host: write host,tokens_per_s,blocks in its first line"),
        (HOSTS, ": has no host"),
        ("host,speed\na,1\n", ", line 1: there is no column tokens_per_s: the columns are host, tokens_per_s, blocks"),
        ("host,tokens_per_s,blocks,colour\n", ", line 1: the column 'colour' is not known: the columns are"),
        ("host,tokens_per_s,blocks,host\n", ", line 1: the column 'host' is there twice"),
        (HOSTS + "a,1,2\n\nb,fast,2\n", ", line 4: tokens_per_s is 'fast': write a number from 0.001 to 1e"),
        (HOSTS + "a,0,2\n", ", line 2: tokens_per_s is '0': write a number from 0.001 to 1e"),
        (HOSTS + "a,inf,2\n", ", line 2: tokens_per_s is 'inf'"),
        (HOSTS + "a,1,2.5\n", ", line 2: blocks is '2.5': write a whole number from 1 to 1000"),
        (HOSTS + "a,1,1001\n", ", line 2: blocks is '1001': write a whole number"),
        (HOSTS + "a,1\n", ", line 2: there are 2 values for 3 columns: write host,tokens_per_s,blocks"),
        (HOSTS + ",1,1\n", ", line 2: there is no name of a host"),
        (HOSTS + "a,1,1\na,2,2\n", ", line 3: the host 'a' is in an earlier line: write one line for each host"),
    ],
)
def test_a_wrong_line_of_hosts_is_named_with_its_fix(tmp_path: Path, content: str, fix: str) -> None:
    file = tmp_path / "hosts.csv"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_hosts(file)
    assert str(raised.value).startswith(f"{file}{fix}")


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        ("host,from_s\na,0\n", ", line 1: there is no column to_s: the columns are host, from_s, to_s, and if wanted"),
        (TRACE + "a,0,1\na,5,5\n", ", line 3: to_s is 5, and from_s is 5: write a later to_s"),
        (TRACE + "a,-1,1\n", ", line 2: from_s is '-1': write seconds from the start, 0 or more"),
        (TRACE + "a,nan,1\n", ", line 2: from_s is 'nan'"),
        (TRACE + "b,0,1\n", ", line 2: the host 'b' has no speed: add it to the file of hosts"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named_with_its_fix(tmp_path: Path, content: str, fix: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_trace(file, speeds={"a": (1.0,)})
    assert str(raised.value).startswith(f"{file}{fix}")


def test_a_host_whose_speed_changes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("host,from_s,to_s,tokens_per_s\na,0,1,5\na,2,3,6\n")
    with pytest.raises(ConfigError, match="line 3: the host 'a' had other speeds in an earlier line"):
        read_trace(file)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.csv: cannot be read \(No such file"):
        read_hosts(tmp_path / "missing.csv")
    file = tmp_path / "hosts.csv"
    file.write_bytes(HOSTS.encode() + b"\xff,1,1\n")
    with pytest.raises(ConfigError, match="line 2, byte 1: 0xff is no UTF-8"):
        read_hosts(file)
