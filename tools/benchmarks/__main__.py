"""``make bench``: costs of epochs and stores, how soon algorithms learn, peers on the same work.

``python -m tools.benchmarks [PART ...] [--write]``; with ``--write`` each table replaces the one in its page. Ratios
are of one run; seconds are of this machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.benchmarks import crossing, epoch, learning, page, peers, scale, store, texts, waits

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = {"learning": DOCS / "algorithms.md"}


def parts(options: argparse.Namespace) -> dict[str, Callable[[], str]]:
    """Return what makes each table, by name."""
    crossed = ["--presets", "digits_crd", "digits", "--seeds", "5", "--set", "run.epochs=24"]
    if options.write:
        crossed += ["--plot", str(DOCS / "images" / "learning.png")]
    return {
        "peers": lambda: peers.compare(options.flow_grpo, options.rounds, list(peers.VARIANTS)),
        "texts": lambda: texts.compare(options.rounds),
        "epoch": epoch.table,
        "store": store.table,
        "scale": lambda: scale.table(scale.parsed(["--runs"])),
        "waits": waits.table,
        "crossing": lambda: crossing.table(crossing.options_of(crossed)),
        "learning": lambda: _learning(options.seeds),
    }


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=3, help="of the table of all presets")
    parser.add_argument("--rounds", type=int, default=5, help="of the peers")
    parser.add_argument("--write", action="store_true", help="put the tables into their pages")
    parser.add_argument("--flow-grpo", type=Path, help="a checkout of Flow-GRPO to compare with")
    options = parser.parse_args()
    made = parts(options)
    if unknown := set(options.parts) - set(made):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(made)}")
    for name in options.parts or made:
        if name == "peers" and options.flow_grpo is None:
            sys.stdout.write(made[name]())
            continue
        measured = page.machine()
        table = made[name]()
        sys.stdout.write(f"## {name}\n\n{table}\n({measured})\n\n")
        sys.stdout.flush()
        if options.write:
            page.write(PAGES.get(name, DOCS / "evidence.md"), name, table, measured)


def _learning(seeds: int) -> str:
    with tempfile.TemporaryDirectory(prefix="flowmill-bench-") as root:
        return learning.table(root, seeds, learning.presets())


if __name__ == "__main__":
    main()
