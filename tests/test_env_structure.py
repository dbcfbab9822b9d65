"""The documentation of the environment, and which way imports point."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import opal_gym
from opal_gym.envs import OpalVLLMEnv
from opal_gym.envs.rewards import TERMS
from tests.episodes import make_env, play

PACKAGE = Path(opal_gym.__file__).parent
HEADINGS = [
    "Description",
    "Action Space",
    "Observation Space",
    "Rewards",
    "Starting State",
    "Episode End",
    "Information",
    "Arguments",
    "Version History",
]
LEARNING = {"torch", "stable_baselines3", "sb3_contrib"}


def sections() -> dict[str, str]:
    """The class docstring's sections by heading."""
    parts = re.split(r"^## (.+)$", inspect.getdoc(OpalVLLMEnv) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_docstring_has_gymnasiums_headings_in_order() -> None:
    assert list(sections()) == HEADINGS
    for heading, text in sections().items():
        assert text.strip(), heading


def test_the_docstring_documents_every_argument() -> None:
    for name in inspect.signature(OpalVLLMEnv).parameters:
        assert f"`{name}`" in sections()["Arguments"], name


def test_the_docstring_documents_every_reward_term() -> None:
    for name in TERMS:
        assert f"`{name}`" in sections()["Rewards"], name


def test_the_docstring_documents_every_key_of_info() -> None:
    for name in play(make_env("slot8-chat", num_requests=2), seed=0)[-1].info:
        assert f"`{name}`" in sections()["Information"], name


def test_the_docstring_documents_every_option_of_reset() -> None:
    for name in ("workload_seed", "rate_scale", "workload"):
        assert f"`{name}`" in (inspect.getdoc(OpalVLLMEnv) or ""), name


# -------------------------------------------------------------------------------- imports


def modules(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it."""
    own = ["opal_gym", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden(path: Path, names: set[str]) -> list[str]:
    return [
        name
        for name in imported(path)
        if any(name == bad or name.startswith(f"{bad}.") for bad in names)
    ]


def test_there_are_modules_to_look_at() -> None:
    assert len(modules("sim")) > 20
    assert len(modules("envs")) >= 4
    assert "gymnasium.error" not in set(imported(PACKAGE / "config.py"))
    assert "gymnasium.spaces" in set(imported(PACKAGE / "envs" / "observations.py"))


@pytest.mark.parametrize("path", modules("sim"), ids=lambda path: path.stem)
def test_the_simulator_knows_neither_gymnasium_nor_agents(path: Path) -> None:
    names = {"gymnasium", "opal_gym.envs", "agents", "scripts", *LEARNING}
    assert not forbidden(path, names)


@pytest.mark.parametrize("path", modules("envs"), ids=lambda path: path.stem)
def test_the_environment_knows_no_agents(path: Path) -> None:
    assert not forbidden(path, {"agents", "scripts", *LEARNING})


def test_the_configuration_knows_neither_gymnasium_nor_the_environment() -> None:
    names = {"gymnasium", "opal_gym.envs", "agents", "scripts", *LEARNING}
    assert not forbidden(PACKAGE / "config.py", names)
