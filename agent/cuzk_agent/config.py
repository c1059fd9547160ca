"""What the agent is told to do: from a TOML file, the environment and the command line, the later ones winning.

    listen = "127.0.0.1:9822"
    from = "end"
    log_level = "info"
    state = "/var/lib/cuzk-agent/agent.state"

    [[source]]
    name = "prover-1"
    path = "/var/log/cuzk.log"

    [timeline]
    silence_limit = "5m"
    rolling_window = "10m"
    age_limit = "auto"

    [gpu]
    pcie_throughput = false
    record = "/var/tmp/cuzk.nvml.jsonl"
    map = { "0" = "GPU-8d3a7c1e-…", "1" = "00000000:2A:00.0" }

The variable of a setting is its key in capitals after CUZK_AGENT_ (CUZK_AGENT_SILENCE_LIMIT), of one in [gpu] after
CUZK_AGENT_GPU_; CUZK_AGENT_GPU_MAP is written `0=GPU-8d3a7c1e-…,1=00000000:2A:00.0`. CUZK_AGENT_LOG names the logs,
separated like the folders in PATH. An empty variable is one that is not set. The logs are one setting: a layer that
names any replaces those of the layers below it.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

Start = Literal["end", "start"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(Exception):
    """The configuration is wrong; the message says where, which key and value, and what was expected."""


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen on."""

    host: str
    """A host name or an IP address; IPv6 without brackets."""
    port: int
    """0 lets the system choose."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_LISTEN: Final = Listen("127.0.0.1", 9822)
_STDIN: Final = Path("-")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One log to follow."""

    name: str
    """Value of the label `source`: unique, 1 to 64 printable characters. Of a pattern it goes before the names of its
    files, and may be empty."""
    path: Path = Path()
    """A file, or several by a pattern; `-` is standard input."""
    unit: str = ""
    """If not empty, it is followed in the journal, and there is no path."""
    tee: bool = False
    """Standard input is passed on to standard output."""
    pattern: Path | None = None
    """Of one of the files that a pattern stands for."""

    @property
    def target(self) -> str:
        """What is followed."""
        return f"the journal of {self.unit}" if self.unit else str(self.path)

    @property
    def is_stdin(self) -> bool:
        """Whether it is standard input."""
        return not self.unit and self.path == _STDIN


@dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration of `cuzk-agent run`."""

    sources: tuple[SourceConfig, ...]
    """At least one."""
    listen: Listen = DEFAULT_LISTEN
    start: Start = "end"
    """Where to begin in a log that is not known yet: count from its end, or from its start."""
    log_level: LogLevel = "info"
    state: Path | None = None
    """Where it is kept what is known, for the agent that comes next; None: nowhere."""
    silence_limit_s: float = 300.0
    """A source with work in flight that is silent for longer tells nothing about its daemon."""
    rolling_window_s: float = 600.0
    """Length of the window of the rolling quantiles."""
    age_limit_s: float | None = None
    """A unit that stays longer in one stage is given up. None: three times the longest recent stay in that stage by
    its kind, and at least 10 minutes."""
    pcie_throughput: bool = False
    """Also ask NVML for the traffic over PCIe: it blocks for 20 ms a direction and GPU, each cycle."""
    gpu_record: Path | None = None
    """Where to keep what NVML says, as JSON lines; with several GPUs, the pattern of the files' names."""
    gpu_map: Mapping[str, str] = field(default_factory=dict)
    """The GPU that the daemons mean by an ordinal, as UUID or PCI bus id. Empty: the daemon's environment tells, if
    it can be read, or else NVML's order is taken for the daemon's."""


def load(
    *,
    file: str | None = None,
    logs: Sequence[str] = (),
    journals: Sequence[str] = (),
    tee: bool = False,
    options: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of all layers together. Raises `ConfigError`.

    `file` is the path given to --config (else CUZK_AGENT_CONFIG is looked at), `logs` the values of --log, `journals`
    of --journal, `tee` whether there is a --tee, `options` the values of other options that were given, by name
    (`--log-level`).
    """
    variables = {name: value for name, value in (environ or {}).items() if value}
    _refuse_misspelt(variables)
    values: dict[str, Any] = {"state": default_state(variables)}
    if path := file or variables.get("CUZK_AGENT_CONFIG"):
        values |= _from_file(Path(path))
    values |= _from_environ(variables)
    values |= _from_options(logs, journals, options or {})
    if not values.get("sources"):
        raise ConfigError(
            "no log to follow: give --log PATH or --journal UNIT, set CUZK_AGENT_LOG, or write a [[source]] into the "
            "file"
        )
    if tee:
        if not any(source.is_stdin for source in values["sources"]):
            raise ConfigError("command line: --tee passes standard input on: expected --log - with it")
        values["sources"] = tuple(replace(source, tee=source.is_stdin) for source in values["sources"])
    return Config(**values)


def to_toml(config: Config) -> str:
    """The configuration as a file from which `load` makes the same."""
    lines = [f"{setting.key} = {_toml(setting.show(getattr(config, setting.field)))}" for setting in _TOP]
    for source in config.sources:
        lines += ["", "[[source]]", *([f"name = {_toml(source.name)}"] if source.name else [])]
        lines += [f"unit = {_toml(source.unit)}" if source.unit else f"path = {_toml(str(source.path))}"]
        lines += ["tee = true"] if source.tee else []
    for table, settings in _TABLES.items():
        lines += ["", f"[{table}]"]
        lines += [f"{setting.key} = {_toml(setting.show(getattr(config, setting.field)))}" for setting in settings]
    return "\n".join(lines) + "\n"


def parse_listen(value: object) -> Listen:
    """From `HOST:PORT` or `[IPV6]:PORT`. Raises ValueError with what was expected."""
    expected = "HOST:PORT, such as 127.0.0.1:9822, [::1]:9822 or 0.0.0.0:9822"
    found = re.fullmatch(r"(?:\[(.+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", value) if isinstance(value, str) else None
    if found is None or int(found[3]) > 65535:
        raise ValueError(expected)
    try:
        host = str(ipaddress.IPv6Address(found[1])) if found[1] else found[2]
    except ValueError:
        raise ValueError(expected) from None
    return Listen(host, int(found[3]))


def parse_source(value: object) -> SourceConfig:
    """From `PATH` or `NAME=PATH`. Raises ValueError with what was expected.

    A relative path that itself looks like `NAME=PATH` is written with `./` before it.
    """
    name, rest = _named(value, _PATH_EXPECTED)
    path = _parse_path(rest)
    return SourceConfig(_name_of(path) if name is None else name, path)


def parse_unit_source(value: object) -> SourceConfig:
    """From `UNIT` or `NAME=UNIT`. Raises ValueError with what was expected."""
    name, rest = _named(value, _UNIT_EXPECTED)
    unit = _parse_unit(rest)
    return SourceConfig(_name_of_unit(unit) if name is None else name, unit=unit)


def _named(value: object, expected: str) -> tuple[str | None, str]:
    if not isinstance(value, str):
        raise ValueError(expected)
    named = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})=(.*)", value, re.DOTALL)
    return (named[1], named[2]) if named is not None and named[1] not in {".", ".."} else (None, value)


_UNITS_S: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PATH_EXPECTED: Final = "the path of a log file"
_UNIT_EXPECTED: Final = "the name of a systemd unit, such as cuzk.service"
_RECORD_EXPECTED: Final = "the path of a file, in a folder that exists"
_GPU_MAP_EXPECTED: Final = "the UUID (GPU-…) or PCI bus id (00000000:2A:00.0) of a GPU for each ordinal of the daemon"
_DEVICE: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,80}|([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")


def _parse_duration(value: object, *, least_s: float, most_s: float) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])", value) if isinstance(value, str) else None
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else -1.0
    if not least_s <= seconds <= most_s:
        raise ValueError(
            f'a duration such as "90s", "5m" or "1.5h", from {_show_duration(least_s)} to {_show_duration(most_s)}'
        )
    return seconds


def _show_duration(seconds: float) -> str:
    for unit, unit_s in _UNITS_S.items():
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def _parse_age_limit(value: object) -> float | None:
    if value == "auto":
        return None
    try:
        return _parse_duration(value, least_s=1, most_s=7 * 86400)
    except ValueError as error:
        raise ValueError(f'"auto" or {error}') from None


def _show_age_limit(seconds: float | None) -> str:
    return "auto" if seconds is None else _show_duration(seconds)


def _parse_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError("true or false")


def _parse_record(value: object) -> Path | None:
    if value == "":
        return None
    try:
        path = _parse_path(value)
        if path.parent.is_dir() and not path.is_dir():
            return path
    except (OSError, ValueError):
        pass
    raise ValueError(_RECORD_EXPECTED)


def _show_record(path: Path | None) -> str:
    return "" if path is None else str(path)


def _parse_gpu_map(value: object) -> dict[str, str]:
    if isinstance(value, str):
        value = dict(pair.strip().partition("=")[::2] for pair in value.split(",") if pair.strip())
    if not isinstance(value, dict):
        raise ValueError(_GPU_MAP_EXPECTED)
    for ordinal, device in value.items():
        if not re.fullmatch("[0-9]{1,3}", ordinal) or not isinstance(device, str) or not _DEVICE.fullmatch(device):
            raise ValueError(_GPU_MAP_EXPECTED)
    if len(set(value.values())) < len(value):
        raise ValueError("each GPU under one ordinal only")
    return value


def _parse_choice(value: object, *, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(" or ".join(f'"{choice}"' for choice in choices))
    return value


def _parse_name(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 64 or not value.isprintable() or value != value.strip():
        raise ValueError("a name of 1 to 64 printable characters, without spaces around it")
    return value


def _parse_path(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(_PATH_EXPECTED)
    return Path(value)


def _parse_state(value: object) -> Path | None:
    if value == "off":
        return None
    if not isinstance(value, str) or not value or "\0" in value or value.endswith("/"):
        raise ValueError('the path of a file, or "off"')
    return Path(value)


def _show_state(path: Path | None) -> str:
    return "off" if path is None else "./off" if str(path) == "off" else str(path)


def default_state(environ: Mapping[str, str]) -> Path | None:
    """Where the state is kept if nothing else is said: where systemd, or else the XDG base directories, have it. None
    for a user without a home."""
    if managed := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(managed) / "agent.state"
    if (base := environ.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(base) / "cuzk-agent/agent.state"
    if (home := environ.get("HOME", "")).startswith("/"):
        return Path(home) / ".local/state/cuzk-agent/agent.state"
    return None


def _parse_unit(value: object) -> str:
    """With its suffix. Nothing in it means anything to a program that is given it."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9:_.\\@-]{0,200}", value):
        raise ValueError(_UNIT_EXPECTED)
    return value if re.search(r"\.(service|scope|slice)$", value) else value + ".service"


def _name_of_unit(unit: str) -> str:
    return _parse_name(unit.rpartition(".")[0].replace("\\", "_")[:64])


def _name_of(path: Path) -> str:
    if path == _STDIN:
        return "stdin"
    if re.search(r"[*?\[]", str(path)):
        # Its files have names.
        return ""
    # Under /var/log/pods a container's logs are called <container>/0.log, 1.log …
    name = path.parent.name if path.stem.isdigit() and path.parent.name else path.stem
    try:
        return _parse_name(name)
    except ValueError as error:
        raise ValueError(f"a name for this source, which its path does not give: {error}") from None


@dataclass(frozen=True, slots=True)
class _Setting:
    field: str
    """Of `Config`."""
    key: str
    """In its table of the file."""
    parse: Callable[[object], object]
    show: Callable[[Any], object]
    """As it stands in a file: a string, a truth value or a table of strings."""


_duration = partial(_parse_duration, most_s=86400)
_TOP: Final = (
    _Setting("listen", "listen", parse_listen, str),
    _Setting("start", "from", partial(_parse_choice, choices=get_args(Start)), str),
    _Setting("log_level", "log_level", partial(_parse_choice, choices=get_args(LogLevel)), str),
    _Setting("state", "state", _parse_state, _show_state),
)
_TIMELINE: Final = (
    _Setting("silence_limit_s", "silence_limit", partial(_duration, least_s=1), _show_duration),
    _Setting("rolling_window_s", "rolling_window", partial(_duration, least_s=10), _show_duration),
    _Setting("age_limit_s", "age_limit", _parse_age_limit, _show_age_limit),
)
_RECORD: Final = _Setting("gpu_record", "record", _parse_record, _show_record)
_GPU: Final = (
    _Setting("pcie_throughput", "pcie_throughput", _parse_switch, bool),
    _RECORD,
    _Setting("gpu_map", "map", _parse_gpu_map, dict),
)
_TABLES: Final = {"timeline": _TIMELINE, "gpu": _GPU}
_PREFIX: Final = "CUZK_AGENT_"
_VARIABLES: Final = {
    **{_PREFIX + setting.key.upper(): setting for setting in (*_TOP, *_TIMELINE)},
    **{f"{_PREFIX}GPU_{setting.key.upper()}": setting for setting in _GPU},
}
_OPTIONS: Final = {
    **{"--" + setting.key.replace("_", "-"): setting for setting in _TOP},
    "--record-nvml": _RECORD,
}
_DOTTED_BY_KEY: Final = {
    **{setting.key: setting.key for setting in _TOP},
    **{setting.key: f"{table}.{setting.key}" for table, settings in _TABLES.items() for setting in settings},
    **{key: key for key in ("source", *_TABLES)},
    **{key: f"source[].{key}" for key in ("name", "path", "unit", "tee")},
}


def _from_file(path: Path) -> dict[str, Any]:
    where = str(path)
    try:
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: is not TOML: {error}") from error

    _refuse_unknown(where, "", top, {setting.key for setting in _TOP} | {"source", *_TABLES})
    values = _parse_table(where, "", top, _TOP)
    for name, settings in _TABLES.items():
        table = top.get(name, {})
        if not isinstance(table, dict):
            raise _wrong(where, name, table, f"a table [{name}]")
        _refuse_unknown(where, f"{name}.", table, {setting.key for setting in settings})
        values |= _parse_table(where, f"{name}.", table, settings)
    tables = top.get("source", [])
    if not isinstance(tables, list):
        raise _wrong(where, "source", tables, "tables [[source]]")
    values["sources"] = _distinct(where, [_parse_source_table(where, n, table) for n, table in enumerate(tables)])
    return values


def _parse_table(where: str, prefix: str, table: Mapping[str, Any], settings: Iterable[_Setting]) -> dict[str, Any]:
    return {
        setting.field: _parse(setting.parse, where, prefix + setting.key, table[setting.key])
        for setting in settings
        if setting.key in table
    }


def _parse_source_table(where: str, number: int, table: object) -> SourceConfig:
    prefix = f"source[{number}]."
    if not isinstance(table, dict):
        raise _wrong(where, prefix.rstrip("."), table, "a table [[source]]")
    _refuse_unknown(where, prefix, table, {"name", "path", "unit", "tee"})
    if "path" in table and "unit" in table:
        raise _wrong(where, prefix + "unit", table["unit"], "either a path or a unit")
    if "unit" in table:
        unit: str = _parse(_parse_unit, where, prefix + "unit", table["unit"])
        source = SourceConfig(_name_of_unit(unit), unit=unit)
    elif "path" in table:
        path: Path = _parse(_parse_path, where, prefix + "path", table["path"])
        source = SourceConfig("", path)
    else:
        raise ConfigError(f"{where}: {prefix}path is missing: expected {_PATH_EXPECTED}, or unit with {_UNIT_EXPECTED}")
    if "name" in table:
        source = replace(source, name=_parse(_parse_name, where, prefix + "name", table["name"]))
    elif not source.unit:
        source = replace(source, name=_parse(lambda _: _name_of(path), where, prefix + "path", table["path"]))
    tee: bool = _parse(_parse_switch, where, prefix + "tee", table.get("tee", False))
    if tee and not source.is_stdin:
        raise _wrong(where, prefix + "tee", table["tee"], 'path = "-" with it')
    return replace(source, tee=tee)


def _from_environ(variables: Mapping[str, str]) -> dict[str, Any]:
    where = "environment"
    values: dict[str, Any] = {
        setting.field: _parse(setting.parse, where, name, variables[name])
        for name, setting in _VARIABLES.items()
        if name in variables
    }
    logs = [log for log in variables.get(_PREFIX + "LOG", "").split(os.pathsep) if log]
    if logs:
        values["sources"] = _distinct(where, [_parse(parse_source, where, _PREFIX + "LOG", log) for log in logs])
    return values


def _from_options(logs: Sequence[str], journals: Sequence[str], options: Mapping[str, str]) -> dict[str, Any]:
    where = "command line"
    values: dict[str, Any] = {
        _OPTIONS[name].field: _parse(_OPTIONS[name].parse, where, name, value) for name, value in options.items()
    }
    sources = [_parse(parse_source, where, "--log", log) for log in logs]
    sources += [_parse(parse_unit_source, where, "--journal", unit) for unit in journals]
    if sources:
        values["sources"] = _distinct(where, sources)
    return values


def _distinct(where: str, sources: Sequence[SourceConfig]) -> tuple[SourceConfig, ...]:
    by_name: dict[str, SourceConfig] = {}
    by_target: dict[str, SourceConfig] = {}
    for source in sources:
        if source.name and source.name in by_name:
            raise ConfigError(
                f'{where}: {by_name[source.name].target} and {source.target} are both named "{source.name}": '
                "expected a name of its own for each log (--log NAME=PATH, or name in [[source]])"
            )
        if source.target in by_target:
            raise ConfigError(
                f'{where}: "{by_target[source.target].name}" and "{source.name}" both follow {source.target}: '
                "expected each log once"
            )
        by_name[source.name] = by_target[source.target] = source
    return tuple(sources)


def _parse(parse: Callable[[object], Any], where: str, key: str, value: object) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise _wrong(where, key, value, str(error)) from None


def _wrong(where: str, key: str, value: object, expected: str) -> ConfigError:
    shown = repr(value)
    if len(shown) > 200:
        shown = shown[:200] + "…"
    return ConfigError(f"{where}: {key} = {shown}: expected {expected}")


def _refuse_unknown(where: str, prefix: str, table: Mapping[str, Any], known: set[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or difflib.get_close_matches(key, _DOTTED_BY_KEY, n=1)
            meant = (prefix + near[0] if near[0] in known else _DOTTED_BY_KEY[near[0]]) if near else None
            raise ConfigError(
                f"{where}: {prefix}{key} is not a setting: expected "
                + (meant or "one of " + ", ".join(prefix + name for name in sorted(known)))
            )


def _refuse_misspelt(variables: Mapping[str, str]) -> None:
    # Only what resembles a variable of ours is refused: Kubernetes sets CUZK_AGENT_PORT, CUZK_AGENT_SERVICE_HOST and
    # others in every container beside a service called cuzk-agent.
    known = {name.removeprefix(_PREFIX) for name in _VARIABLES} | {"CONFIG", "LOG"}
    for name in variables:
        key = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
            if near:
                raise ConfigError(f"environment: {name} is not a setting: expected {_PREFIX}{near[0]}")


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(named)}" for key, named in value.items()) + "}"
    # JSON's strings and truth values are TOML's, but for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
