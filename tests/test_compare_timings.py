"""The command that shows what the seed's timing rule lets a scheduler exploit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_constant_small_chunks_gain_more_under_the_roofline() -> None:
    command = [sys.executable, "scripts/compare_timings.py", "rich-azconv"]
    command += ["--requests", "200", "--seeds", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    roofline, calibrated = run.stdout.split("rich-azconv, calibrated")
    gains = [
        -min(map(float, re.findall(r"([+-][\d.]+)%", table))) for table in (roofline, calibrated)
    ]
    assert gains[0] > 2 * gains[1] > 0


def test_a_mistake_is_named() -> None:
    command = [sys.executable, "scripts/compare_timings.py", "rich-azcon"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 2
    assert "did you mean 'rich-azconv'?" in run.stderr
