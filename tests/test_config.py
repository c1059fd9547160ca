"""The configuration: every layer, every key, every way to get it wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.config import (
    Config,
    ConfigError,
    Listen,
    SourceConfig,
    load,
    parse_listen,
    parse_source,
    to_toml,
)

LOG = SourceConfig("cuzk", Path("/var/log/cuzk.log"))
DEFAULT = Config(sources=(LOG,))
SOURCE = '[[source]]\npath = "/var/log/cuzk.log"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent.toml"


def loaded(file: Path, text: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return load(file=str(file))


# --- what a layer can say


def test_a_log_is_all_that_is_needed() -> None:
    assert load(logs=["/var/log/cuzk.log"]) == DEFAULT


def test_the_defaults_are_the_documented_ones() -> None:
    assert DEFAULT.listen == Listen("127.0.0.1", 9822)
    assert DEFAULT.start == "end"
    assert DEFAULT.log_level == "info"
    assert DEFAULT.silence_limit_s == 300
    assert DEFAULT.rolling_window_s == 600
    assert DEFAULT.age_limit_s is None


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ('listen = "0.0.0.0:80"', {"listen": Listen("0.0.0.0", 80)}),
        ('listen = "[::1]:9822"', {"listen": Listen("::1", 9822)}),
        ('listen = "localhost:0"', {"listen": Listen("localhost", 0)}),
        ('from = "start"', {"start": "start"}),
        ('from = "end"', {}),
        ('log_level = "debug"', {"log_level": "debug"}),
        ('state = "/x/y.state"', {"state": Path("/x/y.state")}),
        ('state = "./off"', {"state": Path("off")}),
        ('state = "off"', {}),
        ('timeline.silence_limit = "90s"', {"silence_limit_s": 90}),
        ('timeline.silence_limit = "1d"', {"silence_limit_s": 86400}),
        ('timeline.rolling_window = "1.5h"', {"rolling_window_s": 5400}),
        ('timeline.age_limit = "auto"', {}),
        ('timeline.age_limit = "45m"', {"age_limit_s": 2700}),
        ('gpu.record = "x.nvml.jsonl"', {"gpu_record": Path("x.nvml.jsonl")}),
        ('gpu.record = ""', {}),
    ],
)
def test_a_file(file: Path, text: str, changes: Mapping[str, Any]) -> None:
    assert loaded(file, f"{text}\n{SOURCE}") == replace(DEFAULT, **changes)


def test_the_sources_of_a_file(file: Path) -> None:
    config = loaded(
        file, '[[source]]\nname = "prover 1 (été)"\npath = "a.log"\n[[source]]\npath = "/var/log/pods/x/cuzk/0.log"'
    )
    assert config.sources == (
        SourceConfig("prover 1 (été)", Path("a.log")),
        SourceConfig("cuzk", Path("/var/log/pods/x/cuzk/0.log")),
    )


@pytest.mark.parametrize(
    ("variable", "value", "changes"),
    [
        ("CUZK_AGENT_LISTEN", "0.0.0.0:80", {"listen": Listen("0.0.0.0", 80)}),
        ("CUZK_AGENT_FROM", "start", {"start": "start"}),
        ("CUZK_AGENT_LOG_LEVEL", "error", {"log_level": "error"}),
        ("CUZK_AGENT_STATE", "x", {"state": Path("x")}),
        ("CUZK_AGENT_STATE", "off", {}),
        ("STATE_DIRECTORY", "/var/lib/cuzk-agent:/more", {"state": Path("/var/lib/cuzk-agent/agent.state")}),
        ("XDG_STATE_HOME", "/home/x/state", {"state": Path("/home/x/state/cuzk-agent/agent.state")}),
        ("XDG_STATE_HOME", "not/absolute", {}),
        ("HOME", "/home/x", {"state": Path("/home/x/.local/state/cuzk-agent/agent.state")}),
        ("CUZK_AGENT_SILENCE_LIMIT", "10m", {"silence_limit_s": 600}),
        ("CUZK_AGENT_ROLLING_WINDOW", "10s", {"rolling_window_s": 10}),
        ("CUZK_AGENT_AGE_LIMIT", "1s", {"age_limit_s": 1}),
        ("CUZK_AGENT_AGE_LIMIT", "auto", {}),
        ("CUZK_AGENT_GPU_RECORD", "/tmp/x.nvml.jsonl", {"gpu_record": Path("/tmp/x.nvml.jsonl")}),
        ("CUZK_AGENT_GPU_RECORD", "", {}),
        ("CUZK_AGENT_LOG", "a=/a:/b/c.log", {"sources": (SourceConfig("a", Path("/a")), parse_source("/b/c.log"))}),
        ("CUZK_AGENT_LISTEN", "", {}),
        ("CUZK_AGENT_PORT", "tcp://10.0.0.1:9822", {}),
        ("CUZK_AGENT_SERVICE_HOST", "10.0.0.1", {}),
        ("CUZK_AGENT_PORT_9822_TCP_PROTO", "tcp", {}),
        ("LISTEN", "nonsense", {}),
    ],
)
def test_the_environment(variable: str, value: str, changes: Mapping[str, Any]) -> None:
    environ = {"CUZK_AGENT_LOG": ":/var/log/cuzk.log:", variable: value}
    assert load(environ=environ) == replace(DEFAULT, **changes)


@pytest.mark.parametrize(
    ("option", "value", "changes"),
    [
        ("--listen", "0.0.0.0:80", {"listen": Listen("0.0.0.0", 80)}),
        ("--from", "start", {"start": "start"}),
        ("--log-level", "warning", {"log_level": "warning"}),
        ("--state", "x", {"state": Path("x")}),
        ("--record-nvml", "x.nvml.jsonl", {"gpu_record": Path("x.nvml.jsonl")}),
        ("--record-nvml", "", {}),
    ],
)
def test_options(option: str, value: str, changes: Mapping[str, Any]) -> None:
    assert load(logs=["/var/log/cuzk.log"], options={option: value}) == replace(DEFAULT, **changes)


def test_the_later_layer_wins(file: Path) -> None:
    file.write_text('listen = "h:1"\nfrom = "start"\n[[source]]\npath = "/f"\n[timeline]\nage_limit = "1h"')
    environ = {"CUZK_AGENT_LISTEN": "h:2", "CUZK_AGENT_AGE_LIMIT": "2h", "CUZK_AGENT_LOG": "/e1:/e2"}
    of_file = load(file=str(file))
    of_both = load(file=str(file), environ=environ)
    of_all = load(file=str(file), environ=environ, options={"--listen": "h:3"}, logs=["/o"])
    assert [config.listen.port for config in (of_file, of_both, of_all)] == [1, 2, 3]
    assert [config.age_limit_s for config in (of_file, of_both, of_all)] == [3600, 7200, 7200]
    assert [[str(source.path) for source in config.sources] for config in (of_file, of_both, of_all)] == [
        ["/f"],
        ["/e1", "/e2"],
        ["/o"],
    ]
    assert {config.start for config in (of_file, of_both, of_all)} == {"start"}


def test_the_environment_names_the_file_unless_an_option_does(tmp_path: Path) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('[[source]]\npath = "/one"')
    other.write_text('[[source]]\npath = "/other"')
    environ = {"CUZK_AGENT_CONFIG": str(one)}
    assert load(environ=environ).sources[0].name == "one"
    assert load(environ=environ, file=str(other)).sources[0].name == "other"


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("/var/log/cuzk.log", "cuzk", "/var/log/cuzk.log"),
        ("cuzk.2.log", "cuzk.2", "cuzk.2.log"),
        ("stderr", "stderr", "stderr"),
        (".log", ".log", ".log"),
        ("/pods/cuzk/0.log", "cuzk", "/pods/cuzk/0.log"),
        ("0.log", "0", "0.log"),
        ("/0.log", "0", "/0.log"),
        ("prover-1=/var/log/a=b.log", "prover-1", "/var/log/a=b.log"),
        ("a_B.9-=x", "a_B.9-", "x"),
        ("./a=b.log", "a=b", "a=b.log"),
        ("/x/a=b.log", "a=b", "/x/a=b.log"),
        (".=b", ".=b", ".=b"),
        ("..=b", ".", "..=b"),
        ("é=b", "é=b", "é=b"),
        ("x" * 65 + "=y/b.log", "b", "x" * 65 + "=y/b.log"),
        ("a=b\nc", "a", "b\nc"),
    ],
)
def test_a_source_on_the_command_line(text: str, name: str, path: str) -> None:
    assert parse_source(text) == SourceConfig(name, Path(path))


# --- what is refused, and what is said then


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('listen = "9822"', "listen = '9822': expected HOST:PORT, such as 127.0.0.1:9822"),
        ("listen = 9822", "listen = 9822: expected HOST:PORT"),
        ('listen = ":9822"', "listen = ':9822': expected HOST:PORT"),
        ('listen = "h:65536"', "listen = 'h:65536': expected HOST:PORT"),
        ('listen = "::1:9822"', "listen = '::1:9822': expected HOST:PORT"),
        ('listen = "[h]:9822"', "listen = '[h]:9822': expected HOST:PORT"),
        ('listen = "http://h:1"', "listen = 'http://h:1': expected HOST:PORT"),
        ("from = true", 'from = True: expected "end" or "start"'),
        ('from = "End"', 'from = \'End\': expected "end" or "start"'),
        ("from = []", 'from = []: expected "end" or "start"'),
        ('state = ""', "state = '': expected the path of a file, or \"off\""),
        ('state = "/x/"', "state = '/x/': expected the path of a file, or \"off\""),
        ('log_level = "trace"', 'log_level = \'trace\': expected "debug" or "info" or "warning" or "error"'),
        (
            "timeline.silence_limit = 5",
            'timeline.silence_limit = 5: expected a duration such as "90s", "5m" or "1.5h", from 1s to 1d',
        ),
        ('timeline.silence_limit = "5"', "timeline.silence_limit = '5': expected a duration"),
        ('timeline.silence_limit = "5 m"', "timeline.silence_limit = '5 m': expected a duration"),
        ('timeline.silence_limit = "-5m"', "timeline.silence_limit = '-5m': expected a duration"),
        ('timeline.silence_limit = "٥m"', "timeline.silence_limit = '٥m': expected a duration"),
        ('timeline.silence_limit = "0.9s"', "timeline.silence_limit = '0.9s': expected a duration"),
        ('timeline.silence_limit = "1.1d"', "timeline.silence_limit = '1.1d': expected a duration"),
        ('timeline.rolling_window = "9s"', "timeline.rolling_window = '9s': expected a duration"),
        ('timeline.age_limit = "Auto"', "timeline.age_limit = 'Auto': expected \"auto\" or a duration"),
        ('timeline.age_limit = "8d"', "timeline.age_limit = '8d': expected \"auto\" or a duration"),
        ('gpu.record = "/no/x"', "gpu.record = '/no/x': expected the path of a file, in a folder that exists"),
        ('gpu.record = "/etc"', "gpu.record = '/etc': expected the path of a file"),
        ('gpu.record = "/etc/passwd/x"', "gpu.record = '/etc/passwd/x': expected the path of a file"),
        ('gpu.record = "x\\u0000"', r"gpu.record = 'x\x00': expected the path of a file"),
        (f'gpu.record = "/{"x" * 300}/x"', "gpu.record = '/xxx"),
        ("gpu.record = true", "gpu.record = True: expected the path of a file"),
        ("timeline = 5", "timeline = 5: expected a table [timeline]"),
        ("[[timeline]]", "timeline = [{}]: expected a table [timeline]"),
        ("lisen = 1", "lisen is not a setting: expected listen"),
        (
            "LISTEN = 1",
            "LISTEN is not a setting: expected one of from, gpu, listen, log_level, source, state, timeline",
        ),
        ("silence_limit = 1", "silence_limit is not a setting: expected timeline.silence_limit"),
        ("path = 1", "path is not a setting: expected source[].path"),
        ("timeline.silense_limit = 1", "timeline.silense_limit is not a setting: expected timeline.silence_limit"),
        ("timeline.listen = 1", "timeline.listen is not a setting: expected listen"),
        (
            "timeline.zzz = 1",
            "timeline.zzz is not a setting: expected one of timeline.age_limit, timeline.rolling_window, timeline.sil",
        ),
        ("listen = ", "is not TOML: Invalid value (at "),
        ("listen = 1\nlisten = 2", "is not TOML: Cannot overwrite a value (at "),
    ],
)
def test_a_wrong_file(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file=str(file))
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source = 5", "source = 5: expected tables [[source]]"),
        ("[source]\npath = '/a'", "source = {'path': '/a'}: expected tables [[source]]"),
        ("source = ['/a']", "source[0] = '/a': expected a table [[source]]"),
        (
            "[[source]]",
            "source[0].path is missing: expected the path of a log file, or unit with the name of a systemd unit",
        ),
        ("[[source]]\npath = ''", "source[0].path = '': expected the path of a log file"),
        ("[[source]]\npath = 5", "source[0].path = 5: expected the path of a log file"),
        ('[[source]]\npath = "/a\\u0000"', r"source[0].path = '/a\x00': expected the path of a log file"),
        ("[[source]]\npath = '/a'\n[[source]]\npth = '/b'", "source[1].pth is not a setting: expected source[1].path"),
        ("[[source]]\npath = '/a'\nfrom = 'end'", "source[0].from is not a setting: expected from"),
        ("[[source]]\npath = '/a'\nname = ''", "source[0].name = '': expected a name of 1 to 64 printable characters"),
        ("[[source]]\npath = '/a'\nname = ' a'", "source[0].name = ' a': expected a name of 1 to 64 printable"),
        ('[[source]]\npath = "/a"\nname = "a\\nb"', r"source[0].name = 'a\nb': expected a name of 1 to 64 printable"),
        (f"[[source]]\npath = '/a'\nname = '{'x' * 65}'", "source[0].name = 'xxx"),
        ("[[source]]\npath = '/a'\nname = 1", "source[0].name = 1: expected a name of 1 to 64 printable characters"),
        ("[[source]]\npath = '/'", "source[0].path = '/': expected a name for this source, which its path does not"),
        (
            "[[source]]\npath = '/a/cuzk.log'\n[[source]]\npath = '/b/cuzk.log'",
            '/a/cuzk.log and /b/cuzk.log are both named "cuzk": expected a name of its own for each log',
        ),
        (
            "[[source]]\nname = 'a'\npath = '/a'\n[[source]]\nname = 'b'\npath = '/./a'",
            '"a" and "b" both follow /a: expected each log once',
        ),
    ],
)
def test_wrong_sources(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file=str(file))
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"CUZK_AGENT_LISTEN": "x"}, "environment: CUZK_AGENT_LISTEN = 'x': expected HOST:PORT"),
        ({"CUZK_AGENT_FROM": "now"}, 'environment: CUZK_AGENT_FROM = \'now\': expected "end" or "start"'),
        ({"CUZK_AGENT_AGE_LIMIT": "5"}, "environment: CUZK_AGENT_AGE_LIMIT = '5': expected \"auto\" or a duration"),
        ({"CUZK_AGENT_LOG": "a=/a:b="}, "environment: CUZK_AGENT_LOG = 'b=': expected the path of a log file"),
        ({"CUZK_AGENT_LOG": "/a/l:/b/l"}, 'environment: /a/l and /b/l are both named "l": expected a name of its own'),
        ({"CUZK_AGENT_GPU_RECORD": "/no/x"}, "environment: CUZK_AGENT_GPU_RECORD = '/no/x': expected the path of a"),
        ({"CUZK_AGENT_LISTN": "x"}, "environment: CUZK_AGENT_LISTN is not a setting: expected CUZK_AGENT_LISTEN"),
        ({"CUZK_AGENT_LOGS": "x"}, "environment: CUZK_AGENT_LOGS is not a setting: expected CUZK_AGENT_LOG"),
        ({"CUZK_AGENT_CONFIG": "/nowhere/x.toml"}, "/nowhere/x.toml: cannot be read: No such file or directory"),
        ({"CUZK_AGENT_CONFIG": "/"}, "/: cannot be read: Is a directory"),
    ],
)
def test_a_wrong_environment(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("logs", "options", "message"),
    [
        ([], {"--listen": "x"}, "command line: --listen = 'x': expected HOST:PORT"),
        ([], {"--from": "0"}, 'command line: --from = \'0\': expected "end" or "start"'),
        ([], {"--log-level": "INFO"}, "command line: --log-level = 'INFO': expected \"debug\" or "),
        ([], {"--record-nvml": "/no/x"}, "command line: --record-nvml = '/no/x': expected the path of a file, in a f"),
        ([""], {}, "command line: --log = '': expected the path of a log file"),
        (["a="], {}, "command line: --log = 'a=': expected the path of a log file"),
        (["/x/\udcff.log"], {}, "command line: --log = '/x/\\udcff.log': expected a name for this source"),
        (["a=/x", "a=/y"], {}, 'command line: /x and /y are both named "a"'),
        (["a=/x", "b=/x"], {}, 'command line: "a" and "b" both follow /x'),
        (
            [],
            {},
            "no log to follow: give --log PATH or --journal UNIT, set CUZK_AGENT_LOG, or write a [[source]]",
        ),
    ],
)
def test_wrong_options(logs: Sequence[str], options: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(logs=logs, options=options)
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_text(file: Path) -> None:
    file.write_bytes(b"listen = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML: 'utf-8' codec can't decode byte 0xff"):
        load(file=str(file))


def test_a_long_value_is_cut(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, f"listen = '{'x' * 10_000}'")
    assert len(str(caught.value)) < 500


# --- the way back


NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=64)
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=100)
SECONDS = st.integers(min_value=10, max_value=86_400) | st.floats(min_value=10, max_value=86_400).map(
    lambda seconds: round(seconds, 3)
)
CONFIGS = st.builds(
    Config,
    sources=st.lists(
        st.builds(SourceConfig, NAMES, PATHS.map(Path)),
        min_size=1,
        unique_by=(lambda source: source.name, lambda source: source.path),
    ).map(tuple),
    listen=st.builds(
        Listen, st.sampled_from(["127.0.0.1", "::", "fe80::1%eth0", "a-host.example"]), st.integers(0, 65535)
    ),
    start=st.sampled_from(["end", "start"]),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
    state=st.sampled_from([None, Path("off"), Path("/x/agent.state")]),
    silence_limit_s=SECONDS,
    rolling_window_s=SECONDS,
    age_limit_s=st.none() | SECONDS,
    pcie_throughput=st.booleans(),
    gpu_record=st.none() | NAMES.map(lambda name: Path("/", name[:32].replace("/", "") + ".jsonl")),
    gpu_map=st.dictionaries(
        st.integers(0, 999).map(str),
        st.from_regex(r"\A(GPU-[0-9a-f]{8}|0000:[0-9a-f]{2}:[0-9a-f]{2}\.0)\Z"),
        max_size=3,
    ).filter(lambda devices: len(set(devices.values())) == len(devices)),
)


@given(config=CONFIGS)
def test_what_is_printed_reads_back_to_the_same(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    assert loaded(file, to_toml(config)) == config


@given(text=st.text())
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        listen = parse_listen(text)
    except ValueError:
        return
    assert parse_listen(str(listen)) == listen


@given(text=st.text())
def test_any_text_is_a_source_or_refused(text: str) -> None:
    try:
        source = parse_source(text)
    except ValueError:
        return
    assert 1 <= len(source.name) <= 64 or set(text) & set("*?[")
    assert source.name.isprintable()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('map = { "0" = "GPU-8d3a7c1e" }', "GPU-8d3a7c1e"),
        ('map = { "0" = "0000:2a:00.0" }', "0000:2a:00.0"),
        ('map = { "0" = "00000000:2A:00.0" }', "00000000:2A:00.0"),
        ('map = { "0" = "MIG-8d3a7c1e-1/2" }', "MIG-8d3a7c1e-1/2"),
    ],
)
def test_the_gpus_of_the_ordinals(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f'[[source]]\npath = "/a"\n[gpu]\n{text}\n')
    assert load(file=str(file)).gpu_map == {"0": expected}


@pytest.mark.parametrize(
    "text",
    ['map = "0"', "map = [1]", 'map = { "zero" = "GPU-1" }', 'map = { "0" = 1 }', 'map = { "0" = "H200" }'],
)
def test_a_wrong_gpu_map_names_the_key_and_what_was_expected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(f'[[source]]\npath = "/a"\n[gpu]\n{text}\n')
    with pytest.raises(ConfigError, match=r"gpu\.map = .*: expected the UUID"):
        load(file=str(file))


def test_two_ordinals_of_one_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="CUZK_AGENT_GPU_MAP = '0=GPU-1,1=GPU-1': expected each GPU under one"):
        load(logs=["/a"], environ={"CUZK_AGENT_GPU_MAP": "0=GPU-1,1=GPU-1"})


def test_the_environment_switches_pcie_throughput_on() -> None:
    environ = {"CUZK_AGENT_GPU_PCIE_THROUGHPUT": "true", "CUZK_AGENT_GPU_MAP": "0=GPU-1, 1=00000000:2A:00.0"}
    config = load(logs=["/a"], environ=environ)
    assert config.pcie_throughput
    assert config.gpu_map == {"0": "GPU-1", "1": "00000000:2A:00.0"}


# --- other sources than files


@pytest.mark.parametrize(
    ("text", "name", "unit"),
    [
        ("cuzk", "cuzk", "cuzk.service"),
        ("cuzk.service", "cuzk", "cuzk.service"),
        ("cuzk-daemon@1.service", "cuzk-daemon@1", "cuzk-daemon@1.service"),
        ("p=run-1.scope", "p", "run-1.scope"),
        ("system.slice", "system", "system.slice"),
    ],
)
def test_a_unit_on_the_command_line(text: str, name: str, unit: str) -> None:
    assert load(journals=[text]).sources == (SourceConfig(name, unit=unit),)


@pytest.mark.parametrize(
    "unit", ["", "-f", "--file=/etc/shadow", "a b", "a;b", "*", "a/b", "é", "x" * 300, "\0", "a\n"]
)
def test_what_is_no_unit_is_refused(unit: str) -> None:
    with pytest.raises(ConfigError, match=r"command line: --journal = .*: expected the name of a systemd unit"):
        load(journals=[unit])


def test_sources_of_all_kinds_come_back_from_toml(file: Path) -> None:
    config = load(logs=["-", "p=/var/log/*.log", "/var/log/cuzk-[ab].log"], journals=["cuzk"], tee=True)
    assert config.sources == (
        SourceConfig("stdin", Path("-"), tee=True),
        SourceConfig("p", Path("/var/log/*.log")),
        SourceConfig("", Path("/var/log/cuzk-[ab].log")),
        SourceConfig("cuzk", unit="cuzk.service"),
    )
    assert loaded(file, to_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[source]]\npath = 'a'\nunit = 'b'", "source[0].unit = 'b': expected either a path or a unit"),
        ("[[source]]\nunit = '-x'", "source[0].unit = '-x': expected the name of a systemd unit"),
        ("[[source]]\npath = 'a'\ntee = true", 'source[0].tee = True: expected path = "-" with it'),
        ("[[source]]\nunit = 'a'\n[[source]]\nname = 'x'\nunit = 'a.service'", "both follow the journal of a.service"),
    ],
)
def test_sources_that_are_wrong(file: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(file, text)
    assert told in str(caught.value)


def test_tee_needs_something_to_pass_on() -> None:
    with pytest.raises(ConfigError, match="--tee passes standard input on"):
        load(logs=["/a"], tee=True)
