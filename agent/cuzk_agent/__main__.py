"""`python -m cuzk_agent` is `cuzk-agent`."""

from __future__ import annotations

import sys

from cuzk_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
