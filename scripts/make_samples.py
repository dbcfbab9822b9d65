"""Writes the sample traces of configs/samples, which are drawn and not recorded.

python scripts/make_samples.py --out configs/samples
"""

from __future__ import annotations

import gzip
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import tyro

from opal_gym.config import CONFIGS, SyntheticWorkload
from opal_gym.sim.workloads import Workload, make_workload

START = datetime(2024, 1, 1)
HASH_BLOCK_TOKENS = 512
BIN_MS = 3000

AZURE_LIKE = {
    "num_requests": 400,
    "arrivals": {"rate_per_s": 5.5, "process": {"kind": "gamma", "cv": 1.5}},
    "tenants": [
        {
            "prompt": {"kind": "lognormal", "median": 1020, "sigma": 0.9, "max": 14000},
            "output": {"kind": "lognormal", "median": 129, "sigma": 0.9, "max": 1000},
        }
    ],
}

MOONCAKE_LIKE = {
    "num_requests": 300,
    "arrivals": {"rate_per_s": 3.4},
    "tenants": [
        {
            "prompt": {"kind": "lognormal", "median": 4000, "sigma": 0.8, "max": 30000},
            "output": {"kind": "lognormal", "median": 350, "sigma": 0.6, "max": 2000},
            "prefix": {"num_prefixes": 20, "tokens": 2048, "zipf": 1.1},
        }
    ],
}


def draw(config: dict[str, Any]) -> Workload:
    return make_workload(
        SyntheticWorkload.model_validate(config),
        0,
        length_information="none",
        hash_block_tokens=HASH_BLOCK_TOKENS,
    )


def azure_like() -> str:
    """A CSV file in the form of the Azure LLM inference traces (times with seven decimals)."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for request in draw(AZURE_LIKE):
        time = START + timedelta(seconds=request.arrival_time)
        lines.append(
            f"{time:%Y-%m-%d %H:%M:%S.%f}0,{request.prompt_tokens},{request.output_tokens}"
        )
    return "\n".join(lines) + "\n"


def mooncake_like() -> str:
    """JSON lines in the form of the Mooncake traces (times on a grid of 3 s)."""
    rows = [
        {
            "timestamp": int(1000 * request.arrival_time) // BIN_MS * BIN_MS,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.hash_ids,
        }
        for request in draw(MOONCAKE_LIKE)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def main(out: Path = CONFIGS / "samples") -> None:
    """Write the sample traces.

    Args:
        out: Directory of the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "azure_like.csv").write_text(azure_like(), encoding="utf-8", newline="\n")
    compressed = gzip.compress(mooncake_like().encode(), mtime=0)
    (out / "mooncake_like.jsonl.gz").write_bytes(compressed)


if __name__ == "__main__":
    tyro.cli(main)
