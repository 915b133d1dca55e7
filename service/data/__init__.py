"""The texts that Lacunar ships; README.md beside this file names the works."""

from __future__ import annotations

from pathlib import Path

CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
HELDOUT_TEXT = Path(__file__).with_name("heldout.txt")
