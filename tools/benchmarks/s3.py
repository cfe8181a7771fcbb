"""What an epoch of the quickstart takes in a store on S3, beside one on a disk.

``python -m tools.benchmarks s3`` asks the server that FLOWMILL_TEST_S3_ENDPOINT names, else moto's, which is slow. Runs
of few and of many epochs take turns on both; what is told is of one more epoch.
"""

from __future__ import annotations

import os
import sys
import tempfile

from tests.support.s3 import make_bucket, named_or_moto
from tools.benchmarks.epoch import run

_ROUNDS, _FEW, _MANY = 3, 2, 14


def table() -> str:
    """Return the least seconds and CPU seconds of an epoch on both, and their ratios."""
    with named_or_moto() as server, tempfile.TemporaryDirectory(prefix="flowmill-s3-") as folder:
        os.environ.update({**server.variables(), "XDG_CACHE_HOME": f"{folder}/cache"})
        roots = {"disk": f"{folder}/store", "S3": f"s3://{make_bucket()}/bench"}
        taken: dict[str, list[tuple[float, ...]]] = {}
        for number in range(_ROUNDS + 1):
            for name, root in roots.items():
                more = [f"tracking.uri=sqlite:///{folder}/{name}.db"]
                if number == 0:
                    # Builds the base.
                    run(root, 0, more=more)
                    continue
                few, many = (run(root, count, seed=100 * number + count, more=more) for count in (_FEW, _MANY))
                each = tuple((after - before) / (_MANY - _FEW) for before, after in zip(few, many, strict=True))
                taken.setdefault(name, []).append(each)
    least = {name: [min(column) for column in zip(*rounds, strict=True)] for name, rounds in taken.items()}
    lines = ["| an epoch of `digits` | CPU s | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {cpu:.2f} | {seconds:.2f} |" for name, (cpu, seconds) in least.items()]
    over = [there / here for here, there in zip(least["disk"], least["S3"], strict=True)]
    return "\n".join([*lines, f"| S3 over disk | {over[0]:.2f} | {over[1]:.2f} |"]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
