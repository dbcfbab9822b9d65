"""Messages about impossible configurations."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

Location = tuple[int | str, ...]


class ConfigError(ValueError):
    """An impossible configuration; the message names the key, the value and what is allowed."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got a JSON {type(data).__name__}; allowed: an object")
    return data


class RefusedError(ValueError):
    """A value that a validator refuses.

    Args:
        key: The key below the validated section or field; empty: the field itself.
        value: The value.
        allowed: What is allowed.
    """

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: got {value!r}; allowed: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


def explain(
    label: str, data: Mapping[str, Any], model: type[BaseModel], error: ValidationError
) -> str:
    """One line for each mistake: key path, value and what is allowed.

    Args:
        label: Where the configuration comes from.
        data: The configuration as given.
        model: What it should be.
        error: What pydantic says of it.
    """
    details = error.errors()
    locations = [detail["loc"] for detail in details]
    lines = [
        f"{label}: {_explain_one(data, model, detail)}"
        for detail in details
        if not any(_is_below(other, detail["loc"]) for other in locations)
    ]
    return "\n".join(lines)


def _is_below(location: Location, other: Location) -> bool:
    """Whether a mistake is inside of another value, which is then wrong only because of it."""
    return len(location) > len(other) and location[: len(other)] == other


def _explain_one(data: Mapping[str, Any], model: type[BaseModel], detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    path = _path(data, detail["loc"], keep_last=kind in ("missing", "extra_forbidden"))
    cause = context.get("error")
    if isinstance(cause, RefusedError):
        return f"{_join(path, cause.key)}: got {cause.value!r}; allowed: {cause.allowed}"
    if isinstance(cause, ConfigError):
        return f"{path}: {cause}"
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_allowed_keys(model, detail['loc'])}"
    if kind == "missing":
        return f"{path}: missing; allowed: a value must be given"
    if kind.startswith("union_tag"):
        key = context["discriminator"].strip("'")
        allowed = context.get("expected_tags") or _tags(model, detail["loc"], key)
        got = f"got {context['tag']!r}" if "tag" in context else "missing"
        return f"{_join(path, key)}: {got}; allowed: {allowed}"
    return f"{path}: got {detail['input']!r}; allowed: {_allowed(detail['msg'])}"


def _allowed(message: str) -> str:
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _join(path: str, key: str) -> str:
    return f"{path}{key}" if key.startswith("[") or not (path and key) else f"{path}.{key}"


def _path(data: Any, location: Location, keep_last: bool) -> str:
    """The location as a reader of the file finds it.

    Pydantic puts the tags of unions into it, and `[key]` for a mapping's key, which are not in the
    data.
    """
    path = ""
    for depth, part in enumerate(location):
        is_last = depth == len(location) - 1
        if isinstance(part, int) and isinstance(data, Sequence):
            path, data = f"{path}[{part}]", data[part]
        elif isinstance(data, Mapping) and part in data:
            path, data = _join(path, str(part)), data[part]
        elif is_last and keep_last:
            path = _join(path, str(part))
    return path


def _allowed_keys(model: type[BaseModel], location: Location) -> str:
    """The keys of the section in which an unknown key stands, and the likely one."""
    section: Any = model
    for part in location[:-1]:
        section = _descend(section, part)
    allowed = sorted(_sections(section)[0].model_fields)
    near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{hint}; allowed: {', '.join(allowed)}"


def _tags(model: type[BaseModel], location: Location, key: str) -> str:
    """The values that tell the members of a union apart."""
    section: Any = model
    for part in location:
        section = _descend(section, part)
    return ", ".join(repr(member.model_fields[key].default) for member in _sections(section))


def _descend(annotation: Any, part: int | str) -> Any:
    if isinstance(part, int):
        return annotation
    members = _sections(annotation)
    for member in members:
        if _tag(member) == part:
            return member
    field = members[0].model_fields.get(part)
    return members[0] if field is None else field.annotation


def _tag(section: type[BaseModel]) -> Any:
    fields = section.model_fields
    field = fields.get("kind", fields.get("model"))
    return None if field is None else field.default


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The configuration models that an annotation mentions, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = []
    for inner in getattr(annotation, "__args__", ()):
        found += _sections(inner)
    return found
