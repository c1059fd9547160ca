"""Stands in for journalctl: tells a journal that is a file of JSON entries, beside this script.

`fail` in that directory is what it says before it fails at once; `arguments` gets the arguments of each run.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
arguments = sys.argv[1:]
with (HERE / "arguments").open("a", encoding="utf-8") as told:
    told.write(json.dumps(arguments) + "\n")
options = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
if (HERE / "fail").exists():
    sys.exit((HERE / "fail").read_text(encoding="utf-8"))


def cursor(line: str) -> str:
    return str(json.loads(line)["__CURSOR"])


with (HERE / "journal").open(encoding="utf-8", errors="surrogateescape") as journal:
    lines = journal.readlines()
    cursors = [cursor(line) for line in lines]
    if "cursor" in options:
        lines = lines[cursors.index(options["cursor"]) :] if options["cursor"] in cursors else lines
    elif "after-cursor" in options:
        lines = lines[cursors.index(options["after-cursor"]) + 1 :]
    elif "lines" in options:
        lines = lines[-int(options["lines"]) :]
    while True:
        for line in lines:
            sys.stdout.write(line)
        sys.stdout.flush()
        if "follow" not in options:
            break
        assert "no-tail" in options
        time.sleep(0.01)
        lines = journal.readlines()
        if (HERE / "die").exists():
            (HERE / "die").unlink()
            sys.exit("Failed to iterate through journal: Bad message")
