"""`python -m cuzk_dashboards [DIRECTORY]` writes all dashboards."""

from __future__ import annotations

import sys
from pathlib import Path

from cuzk_dashboards.boards import boards

DASHBOARDS = Path(__file__).parent.parent / "dashboards"


def main(directory: Path) -> None:
    """Writes the boards, and removes what is none of them any more."""
    written = {directory / f"{board.uid}.json": board.render() for board in boards()}
    for file in set(directory.glob("*.json")) - written.keys():
        file.unlink()
    for file, text in written.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DASHBOARDS)
