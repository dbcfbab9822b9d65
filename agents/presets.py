"""Presets: heuristics that were chosen for a scenario, as files."""

from __future__ import annotations

import json
from pathlib import Path

PRESETS = Path(__file__).parent / "presets"
"""Where the shipped presets lie, and `scripts/tune.py` writes new ones."""

PREFIX = "preset:"
"""Begins the name of a policy that is a preset."""


def preset_names() -> list[str]:
    """Names of the presets in `PRESETS`."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def load_preset(name: str) -> str:
    """The heuristic of a preset, as `agents.grid.Heuristic.parse` reads it.

    Args:
        name: A file's name in `PRESETS` without its ending, or the path of a JSON file.

    Raises:
        ValueError: There is no such preset, or its file is none.
    """
    path = Path(name) if name.endswith(".json") else PRESETS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(preset_names()) or "none so far"
        raise ValueError(
            f"got {name!r}; allowed: a JSON file that scripts/tune.py wrote, or one of {known}"
        )
    try:
        policy = json.loads(path.read_text(encoding="utf-8"))["policy"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: got {error!r}; allowed: JSON with a key 'policy'") from None
    if not isinstance(policy, str):
        raise ValueError(f"{path}: policy: got {policy!r}; allowed: a heuristic's name")
    return policy
