"""``make bench``: how every algorithm learns the quickstart, what orchestration costs, ratios of kernels and stores.

Ratios are taken within one run; seconds are of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import embeddings, kernels, learning, peers, rewards, store


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--presets", nargs="*", default=learning.presets(), help="quickstart presets to train")
    parser.add_argument("--write", type=Path, help="also write the learning table to this file")
    parser.add_argument("--flow-grpo", type=Path, help="a checkout of Flow-GRPO to compare with")
    options = parser.parse_args()
    kernels.main()
    store.main()
    embeddings.main()
    rewards.main()
    sys.stdout.write(peers.compare(options.flow_grpo, 3, list(peers.VARIANTS)))
    with tempfile.TemporaryDirectory(prefix="flowmill-bench-") as root:
        table = learning.table(root, options.seeds, options.presets)
    sys.stdout.write(table)
    if options.write:
        options.write.write_text(table)


if __name__ == "__main__":
    main()
