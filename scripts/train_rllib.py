"""Trains a scheduler by RLlib's PPO; the same command takes up a training that was stopped.

python scripts/train_rllib.py rllib-mem-chat-burst --num-env-runners 2
python scripts/train_rllib.py rllib-mem-chat-burst --num-env-runners 64 --address 10.0.0.1:6379
tensorboard --logdir runs
python scripts/evaluate.py --policies fifo-lwd pretrained:runs/rllib-mem-chat-burst-0/best.npz
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

# Sums of floats depend on how they are spread over threads; set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import tyro
from rich.console import Console

from agents.cluster import connect
from agents.files import check_writable
from agents.missing import require
from opal_gym.config import ConfigError
from opal_gym.sim.workloads import TraceError

if TYPE_CHECKING:
    from agents.learning.settings import TrainingConfig
    from agents.learning.training import Run

RUNS = Path("runs")
BAD_INPUT, INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Arguments:
    """Train a scheduler by RLlib's PPO as a YAML file of settings of kind rllib-ppo says.

    Writes into a directory, as train.py does: checkpoint.pt and RLlib's own checkpoint after every
    iteration, from which the same command goes on; best.npz, the policy that was best on the
    validation workloads, which evaluate.py takes; curves.json; run.json with settings, command and
    versions; and TensorBoard's events.
    """

    training: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE")]
    """Settings: a name from configs/training, or a YAML file."""
    seed: int | None = None
    """Seed of workloads, weights and samples; default: the settings'."""
    iterations: int | None = None
    """Iterations; default: the settings'."""
    num_env_runners: int = 2
    """Processes in which environments run, a CPU of the cluster each; which of them simulates which
    workload depends on it. 0: the environments run in this process."""
    address: str = ""
    """Ray cluster: host:port of its head, auto (the one begun on this machine) or local (a new
    one); default: that of RAY_ADDRESS, or else local."""
    out: Path | None = None
    """Directory of the run; default: runs/NAME-SEED."""


def main(arguments: Arguments) -> int:
    console = Console()
    try:
        require("train", "torch", "stable_baselines3", "sb3_contrib", "tensorboard", "yaml")
        require("rllib", "ray")
        training = load(arguments)
        out = arguments.out or RUNS / f"{training.name}-{training.seed}"
        check_writable(out)
        connect(arguments.address)
        check_cpus(arguments.num_env_runners)
        return train(training, out, arguments, console)
    except (ValueError, ConfigError, TraceError, OSError, ImportError) as error:
        for line in str(error).splitlines():
            Console(stderr=True).print(f"error: {line}", markup=False, soft_wrap=True)
        return BAD_INPUT


def load(arguments: Arguments) -> TrainingConfig:
    from agents.learning.command_line import load
    from agents.learning.settings import RLlibSettings

    for name, least in (("seed", 0), ("iterations", 1), ("num_env_runners", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag}: got {value}; allowed: at least {least}")
    training = load(arguments.training, seed=arguments.seed, iterations=arguments.iterations)
    if not isinstance(training.algorithm, RLlibSettings):
        kind = training.algorithm.kind
        raise ValueError(f"algorithm.kind: got {kind!r}; allowed: 'rllib-ppo' (see train.py)")
    return training


def check_cpus(num_env_runners: int) -> None:
    """Ray would wait for more CPUs without a word."""
    import ray

    cpus = int(ray.cluster_resources().get("CPU", 0))
    if num_env_runners > cpus:
        raise ValueError(
            f"--num-env-runners: got {num_env_runners}; allowed: up to {cpus}, the cluster's CPUs"
        )


def train(training: TrainingConfig, out: Path, arguments: Arguments, console: Console) -> int:
    from agents.learning.command_line import finish

    started = time.time()
    try:
        run = begun(training, out, arguments.num_env_runners)
        used = {"num_env_runners": arguments.num_env_runners, "address": arguments.address}
        finish(run, console, started, **used)
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {out}", soft_wrap=True)
        return INTERRUPTED
    return 0


def begun(training: TrainingConfig, out: Path, num_env_runners: int) -> Run:
    """A new run, or one that is taken up."""
    import torch
    from stable_baselines3.common.logger import Logger, configure

    from agents.learning.processes import Processes
    from agents.learning.rllib_trainer import RLlibTrainer
    from agents.learning.training import Run

    torch.set_num_threads(1)
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)

    def make(training: TrainingConfig, processes: Processes, logger: Logger) -> RLlibTrainer:
        checkpoints = out / "rllib"
        return RLlibTrainer(training, processes, checkpoints=checkpoints, runners=num_env_runners)

    return Run(training, out, Processes(), configure(str(out), ["tensorboard"]), make)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
