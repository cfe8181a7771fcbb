"""``make bench``: what the pipeline costs beside the work, and how well the quickstart learns.

Ratios are taken within one run; seconds are of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def flowmill(*arguments: str) -> str:
    """Run the command line and return what it prints."""
    environment = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return result.stdout


def learning(root: str, seeds: int) -> None:
    """Train the digits preset with several seeds; print held-out exact match and the share of overhead."""
    for seed in range(seeds):
        name = f"digits-{seed}"
        output = flowmill("run", "configs/digits.yaml", "--root", root, "--name", name, "--set", f"run.seed={seed}")
        status = json.loads(flowmill("status", name, "--root", root, "--json"))
        last = max(status["evaluations"], key=int)
        before, after = (status["evaluations"][epoch]["heldout"]["digits"]["exact"] for epoch in ("0", last))
        cost = next(line.strip() for line in output.splitlines() if "orchestration" in line)
        sys.stdout.write(f"seed {seed}: held-out exact match {before:.3f} -> {after:.3f}; {cost}\n")


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flowmill-bench-") as root:
        learning(root, options.seeds)


if __name__ == "__main__":
    main()
