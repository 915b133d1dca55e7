"""How log lines look, the same in the API process and in the engine process."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message; the fields of `extra={"fields": {...}}` beside
    them, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: int | str, log_format: LogFormat = "text") -> None:
    """Write log lines to standard error: Lacunar's own from `level` on, other libraries' warnings."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("lacunar").setLevel(level)
