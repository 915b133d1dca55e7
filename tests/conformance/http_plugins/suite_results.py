"""A pytest plug-in: writes every test's outcome as a JSON line into SUITE_RESULTS.

A test that raises NotApplicable, or whose fixtures do, is recorded as not applicable with that reason.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


class NotApplicable(Exception):
    """The test asks for something that is no property of this server; the message says what."""


def skip_reason(report: Any) -> str:
    """Why a test was skipped, in the suite's own words."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _write(row: dict[str, Any]) -> None:
    with Path(os.environ["SUITE_RESULTS"]).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if call.excinfo is not None and call.excinfo.errisinstance(NotApplicable):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, str(call.excinfo.value))
        report.not_applicable = True
    if report.when == "call" or report.outcome != "passed":
        if report.when == "teardown" and report.outcome == "passed":
            return
        detail = ""
        if report.outcome == "skipped":
            detail = skip_reason(report)
        elif report.outcome == "failed":
            assert call.excinfo is not None
            detail = f"{call.excinfo.typename}: {call.excinfo.value}"
        _write({"test": item.nodeid, "when": report.when, "outcome": report.outcome, "detail": detail[:600]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(
            {
                "test": report.nodeid,
                "when": "collect",
                "outcome": "failed",
                "detail": str(report.longrepr)[-600:],
            }
        )
