"""The journal of a unit, through a stand-in for journalctl, and through the real one where that can be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuzk_agent.log.envelope import Envelope
from cuzk_agent.log.journal import EXIT_DELAY_S, JOURNAL_LAG_S, JournalFollower, entry
from cuzk_agent.log.position import JournalPosition, from_json, to_json
from cuzk_agent.log.source import Batch, FollowState

UNIT = "cuzk.service"
UNIX_S = 1_795_996_800.25
REMOTE = shutil.which("systemd-journal-remote") or "/lib/systemd/systemd-journal-remote"


class Journal:
    """A journal, and who follows it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "journal"
        self.file.touch()
        shutil.copy(Path(__file__).with_name("journalctl.py"), directory)
        self.command: tuple[str, ...] = (sys.executable, str(directory / "journalctl.py"))
        self.now_s = 1000.0
        self.number = 0
        self.lines: list[bytes] = []
        self.times: list[float | None] = []
        self.breaks: list[int] = []
        """By the number of lines before."""
        self.past: list[bytes] = []
        self.follower: JournalFollower | None = None

    def add(self, message: object = "a line", **fields: object) -> None:
        """An entry of the daemon, if nothing else is said."""
        self.number += 1
        value = {
            "__CURSOR": f"s=1;i={self.number}",
            "__REALTIME_TIMESTAMP": str(int((UNIX_S + self.number) * 1e6)),
            "_SYSTEMD_UNIT": UNIT,
            "_PID": "100",
            "_COMM": "cuzk-daemon",
            "MESSAGE": message,
            **fields,
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: field for name, field in value.items() if field is not ...}) + "\n")

    def manager(self, message: str, **fields: object) -> None:
        """systemd says something of the unit."""
        self.add(message, _PID="1", _COMM="systemd", _SYSTEMD_UNIT="init.scope", UNIT=UNIT, **fields)

    def start(self, *, end: bool = False, warm_up_lines: int = 0, resume: JournalPosition | None = None) -> None:
        self.follower = JournalFollower(
            UNIT,
            "end" if end else "start",
            lambda: self.now_s,
            resume=resume,
            warm_up_lines=warm_up_lines,
            command=self.command,
        )
        self.read_until(lambda: self.followed.stats().caught_up or self.is_missing())

    def is_missing(self) -> bool:
        return self.followed.stats().state is FollowState.MISSING

    @property
    def followed(self) -> JournalFollower:
        assert self.follower is not None
        return self.follower

    def read(self) -> Batch:
        batch = self.followed.read()
        self.breaks += [len(self.lines) + index for index in batch.breaks]
        (self.past if batch.past else self.lines).extend(batch.lines)
        if not batch.past:
            self.times += batch.line_unix_s or ()
        return batch

    def read_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 20
        while not condition():
            self.read()
            assert time.monotonic() < deadline_s, (self.followed.stats(), self.lines)
            time.sleep(0.005)

    def read_lines(self, count: int) -> None:
        self.read_until(lambda: len(self.lines) >= count)

    def restart(self) -> None:
        position = from_json(json.loads(json.dumps(to_json(self.followed.position()))))
        assert isinstance(position, JournalPosition)
        self.followed.close()
        self.start(resume=position)

    def runs(self) -> list[list[str]]:
        """What each run of journalctl was asked for, less what all are."""
        told = (self.directory / "arguments").read_text(encoding="utf-8").splitlines()
        common = ["--output=json", "--all", "--quiet", "--no-pager", f"--unit={UNIT}"]
        assert all(json.loads(line)[:5] == common for line in told)
        return [json.loads(line)[5:] for line in told]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    yield made
    if made.follower is not None:
        made.follower.close()


def test_from_the_start(journal: Journal) -> None:
    journal.add("one")
    journal.add([27, 91, 50, 109, 255, 0, 116, 119, 111])
    journal.start()
    journal.add("three", _SOURCE_REALTIME_TIMESTAMP="1795996800000001")
    journal.read_lines(3)
    assert journal.lines == [b"one", b"\x1b[2m\xfftwo", b"three"]
    assert journal.times == [UNIX_S + 1, UNIX_S + 2, 1795996800.000001]
    assert journal.runs() == [[], ["--follow", "--no-tail", "--after-cursor=s=1;i=2"]]
    stats = journal.followed.stats()
    assert (stats.state, stats.lines, stats.restarts, stats.envelope) == (FollowState.FOLLOWING, 3, 0, Envelope.JOURNAL)
    assert journal.read().read_monotonic_s == journal.now_s - JOURNAL_LAG_S


def test_from_the_end(journal: Journal) -> None:
    journal.add("old")
    journal.start(end=True)
    journal.add("new")
    journal.read_lines(1)
    assert (journal.lines, journal.past) == ([b"new"], [])


def test_from_the_end_of_nothing(journal: Journal) -> None:
    journal.start(end=True)
    assert journal.is_missing()
    # There may be no such unit.
    assert journal.followed.stats().detail == f"{UNIT} has no entry in the journal yet"
    journal.add("new")
    journal.read_lines(1)
    assert journal.runs()[1] == ["--follow", "--no-tail"]
    stats = journal.followed.stats()
    assert (stats.state, stats.detail, stats.restarts) == (FollowState.FOLLOWING, "", 0)


def test_read_back_to_warm_up(journal: Journal) -> None:
    for number in range(10):
        journal.add(f"old {number}")
    journal.start(end=True, warm_up_lines=3)
    journal.add("new")
    journal.read_lines(1)
    assert (journal.lines, journal.past) == ([b"new"], [b"old 7", b"old 8", b"old 9"])


def test_restarts_go_on_where_it_was(journal: Journal) -> None:
    journal.add("one")
    journal.start()
    journal.add("half of ", _LINE_BREAK="line-max")
    journal.read_until(lambda: journal.followed.position().pending)
    journal.restart()
    journal.add("a line")
    journal.read_lines(2)
    journal.restart()
    journal.add("three")
    journal.add("four")
    journal.restart()
    journal.read_lines(4)
    assert journal.lines == [b"one", b"half of a line", b"three", b"four"]
    assert journal.times[1] == UNIX_S + 2
    stats = journal.followed.stats()
    assert (stats.lines, stats.truncations, stats.lost_lines) == (4, 0, 0)


def test_what_was_read_last_is_gone(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    journal.add("one")
    journal.start()
    journal.file.write_text("")
    journal.add("two")
    journal.restart()
    journal.read_lines(2)
    assert journal.followed.stats().truncations == 1
    assert "no longer in the journal" in caplog.text


def test_another_process_is_another_engine(journal: Journal) -> None:
    journal.add("one")
    journal.start()
    journal.add("from a helper", _PID="101", _COMM="sh")
    journal.add("two")
    journal.add("from another helper", _PID="102", _COMM="curl")
    journal.add("three", _PID="200")
    journal.add("the last words of the first")
    journal.add("four", _PID="200")
    journal.add("five", _PID="200", _SYSTEMD_INVOCATION_ID="a")
    journal.read_lines(8)
    assert journal.breaks == [4, 7]
    journal.restart()
    journal.add("six", _PID="200", _SYSTEMD_INVOCATION_ID="a")
    journal.add("seven", _PID="201", _SYSTEMD_INVOCATION_ID="a")
    journal.read_lines(10)
    assert journal.breaks == [4, 7, 9]


@pytest.mark.parametrize(
    ("message", "fields", "is_end"),
    [
        ("cuzk.service: Main process exited, code=killed, status=9/KILL", {}, True),
        ("cuzk.service: Deactivated successfully.", {"MESSAGE_ID": "7ad2d189f7e94e70a38c781354912448"}, True),
        ("Stopped cuzk.service.", {"MESSAGE_ID": "9d1aaa27d60140bd96365438aad20286"}, True),
        ("cuzk.service: Control process exited, code=exited, status=1/FAILURE", {}, False),
        ("Started cuzk.service.", {"MESSAGE_ID": "39f53479d3a045ac8e11786248231fbf"}, False),
    ],
)
def test_what_systemd_says_is_no_line(journal: Journal, message: str, fields: dict[str, str], is_end: bool) -> None:
    journal.add("one")
    journal.start()
    journal.manager(message, **fields)
    journal.add("its last words")
    journal.read_lines(2)
    assert journal.breaks == []
    journal.restart()
    journal.now_s += EXIT_DELAY_S
    journal.read_until(lambda: journal.read().at_end)
    assert journal.breaks == [2] * is_end
    journal.add("a new one", _PID="200")
    journal.read_lines(3)
    assert journal.lines == [b"one", b"its last words", b"a new one"]


def test_messages_that_were_dropped(journal: Journal) -> None:
    journald = {"_SYSTEMD_UNIT": "systemd-journald.service", "SYSLOG_IDENTIFIER": "systemd-journald", "_PID": "50"}
    journal.add("Suppressed 1234 messages from cuzk.service", **journald, N_DROPPED="1235")
    journal.add("Suppressed 10 messages from cuzk.service", **journald)
    journal.add("Suppressed 99 messages, says the daemon")
    journal.add(None)
    journal.start()
    journal.read_lines(1)
    assert journal.lines == [b"Suppressed 99 messages, says the daemon"]
    assert journal.followed.stats().lost_lines == 1235 + 10 + 1


def test_lines_are_bounded(journal: Journal) -> None:
    for _ in range(20):
        journal.add("x" * 8000, _LINE_BREAK="line-max")
    journal.add("end")
    journal.add("x" * 70_000)
    journal.add("y" * (2 << 20))
    journal.add("last")
    journal.start()
    journal.read_lines(3)
    assert journal.lines == [b"x" * 65536, b"x" * 65536, b"last"]
    stats = journal.followed.stats()
    assert (stats.overlong_lines, stats.lost_lines) == (2, 1)


def test_several_lines_in_one_message(journal: Journal) -> None:
    journal.add("one\r\ntwo\n")
    journal.add(["three", "four"])
    journal.start()
    journal.read_lines(3)
    assert journal.lines == [b"one", b"two", b"three"]


def test_it_dies_and_is_started_again(journal: Journal) -> None:
    journal.add("one")
    journal.start()
    (journal.directory / "die").touch()
    journal.read_until(lambda: journal.followed.stats().state is FollowState.UNREADABLE)
    detail = "journalctl ended with status 1: Failed to iterate through journal: Bad message"
    assert journal.followed.stats().detail == detail
    journal.add("two")
    journal.now_s += 0.9
    assert not journal.read().at_end
    assert len(journal.runs()) == 2
    journal.now_s += 0.2
    journal.read_lines(2)
    journal.read_until(lambda: journal.followed.stats().state is FollowState.FOLLOWING)
    assert (journal.lines, journal.followed.stats().restarts) == ([b"one", b"two"], 1)


def test_it_is_started_later_and_later(journal: Journal) -> None:
    (journal.directory / "fail").write_text("No journal files were opened due to insufficient permissions.")
    journal.follower = JournalFollower(UNIT, "end", lambda: journal.now_s, command=journal.command)
    waits = []
    for failures in range(1, 10):
        started_s = journal.now_s
        while journal.followed.stats().restarts < failures:
            assert not journal.read().at_end
            if journal.followed._child is None:
                journal.now_s += 0.5
            time.sleep(0.002)
        waits.append(journal.now_s - started_s)
    assert "insufficient permissions" in journal.followed.stats().detail
    assert waits[1:] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_there_is_no_journalctl(journal: Journal) -> None:
    journal.command = (str(journal.directory / "nothing"),)
    follower = JournalFollower(UNIT, "end", lambda: 0.0, command=journal.command)
    assert not follower.read().at_end
    assert follower.stats().detail == f"{journal.command[0]}: No such file or directory"
    follower.close()


def test_close_ends_it(journal: Journal) -> None:
    journal.start()
    child = journal.followed._child
    assert child is not None
    journal.followed.close()
    assert child._process.poll() is not None
    journal.now_s += 100
    assert journal.read().lines == ()


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
NAMES = st.sampled_from(
    ["MESSAGE", "_PID", "_COMM", "_SYSTEMD_UNIT", "MESSAGE_ID", "N_DROPPED", "__REALTIME_TIMESTAMP", "_LINE_BREAK"]
)


@given(value=st.dictionaries(NAMES, VALUES, max_size=5), cut=st.integers(0, 300))
def test_whatever_the_fields_are(value: dict[str, object], cut: int) -> None:
    record = json.dumps({"__CURSOR": "x", **value}).encode()
    one = entry(record, UNIT)
    assert one is not None
    assert all(b"\n" not in line and b"\0" not in line for line in one.lines)
    entry(record[:cut], UNIT)


@given(st.binary(max_size=200))
def test_whatever_it_writes(record: bytes) -> None:
    assert entry(record, UNIT) is None
    entry(b'{"__CURSOR":"a","MESSAGE":' + record + b"}", UNIT)


@pytest.mark.skipif(not Path(REMOTE).exists(), reason="needs systemd-journal-remote to make a journal")
def test_the_real_one(journal: Journal) -> None:
    messages = [b"\x1b[2mTIMELINE,1\x1b[0m", b"plain \xff", b"x" * 100_000, b"last"]
    export = b""
    for number, message in enumerate(messages):
        fields = {
            b"__REALTIME_TIMESTAMP": b"%d" % int((UNIX_S + number) * 1e6),
            b"__MONOTONIC_TIMESTAMP": b"%d" % (number + 1),
            b"_BOOT_ID": b"0123456789abcdef0123456789abcdef",
            b"_SYSTEMD_UNIT": UNIT.encode(),
            b"_PID": b"100" if number < 2 else b"200",
            b"_COMM": b"cuzk-daemon",
        }
        export += b"".join(name + b"=" + value + b"\n" for name, value in fields.items())
        export += b"MESSAGE\n" + len(message).to_bytes(8, "little") + message + b"\n\n"
    file = journal.directory / "real.journal"
    subprocess.run([REMOTE, "-o", str(file), "-"], input=export, check=True, capture_output=True)
    journal.command = ("journalctl", f"--file={file}")
    journal.start()
    assert journal.lines == [messages[0], messages[1], messages[2][:65536], messages[3]]
    assert journal.times == [UNIX_S + number for number in range(4)]
    assert journal.breaks == [2]
    journal.restart()
    assert len(journal.lines) == 4
    assert journal.followed.stats().truncations == 0
