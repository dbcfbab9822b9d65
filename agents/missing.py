"""Packages of an extra that is not installed."""

from __future__ import annotations

from importlib.util import find_spec


def require(extra: str, *modules: str) -> None:
    """Asks for an extra before anything of it is imported.

    Raises:
        ImportError: One of its modules is missing; the message says how to install them.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ImportError(
            f"this needs the extra {extra!r} ({', '.join(missing)}): pip install -e '.[{extra}]'"
        )
