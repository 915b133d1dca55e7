"""How log lines look, the same in the API process and in the engine process."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: int | str) -> None:
    """Write log lines to standard error: Lacunar's own from `level` on, other libraries' warnings."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("lacunar").setLevel(level)
