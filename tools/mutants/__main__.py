"""``python -m tools.mutants``: sample single-operator mutants of the maths and see whether their own tests notice.

Nothing is written into this tree: every mutant lives in a temporary copy. Always run are the named mutants of
``tables.py``; sampled ones that compute the same as the original are listed there with the reason, and left out.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time

from tools.mutants.campaign import ROOT, Outcome, SampleRequest, run
from tools.mutants.make import Mutant, mutants
from tools.mutants.tables import EQUIVALENT, FILES, NAMED, own_tests


def main() -> int:
    """Run the campaign; return 0 when enough mutants, and all named ones, were killed."""
    options = _options()
    # A temporary folder and running tests must not be left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sampled = [] if options.named_only else sample(options.count, options.seed, options.only)
    jobs = [*named_jobs(), *(_job(mutant) for mutant in sampled)]
    began = time.monotonic()
    unchanged = [] if options.skip_unchanged else _unchanged({job.tests: job.path for job in jobs})
    outcomes = run(jobs, unchanged, processes=options.processes, limit=options.limit, done=_tell)
    outcomes = [outcome for outcome in outcomes if outcome.job in jobs]
    named = [outcome for outcome in outcomes if outcome.job.label.startswith("named")]
    drawn = [outcome for outcome in outcomes if outcome not in named]
    survivors = [outcome for outcome in outcomes if not outcome.killed]
    for outcome in survivors:
        _write(f"\nSURVIVED {outcome.job.label}\n")
    killed = sum(outcome.killed for outcome in drawn)
    share = killed / len(drawn) if drawn else 1.0
    _write(
        f"\nnamed: {sum(o.killed for o in named)} of {len(named)} killed; sampled (seed {options.seed}): {killed} of "
        f"{len(drawn)} killed ({share:.1%}); {time.monotonic() - began:.0f} s\n"
    )
    return int(share < options.threshold or not all(outcome.killed for outcome in named))


def population(only: str = "") -> list[Mutant]:
    """Return every mutant of the files, those listed as equivalent left out; ``only`` selects paths that hold it."""
    listed = {(each.path, each.before, each.after) for each in EQUIVALENT}
    found: list[Mutant] = []
    for path in sorted({path for pattern in FILES for path in ROOT.glob(pattern)}):
        name, source = path.relative_to(ROOT).as_posix(), path.read_bytes()
        if only in name:
            found += [m for m in mutants(name, source) if (name, *m.change(source)) not in listed]
    return found


def sample(count: int, seed: int, only: str = "") -> list[Mutant]:
    """Return ``count`` mutants drawn without replacement."""
    everything = population(only)
    random.Random(seed).shuffle(everything)
    for mutant in everything[:count]:
        compile(mutant.apply((ROOT / mutant.path).read_bytes()), mutant.path, "exec")
    return everything[:count]


def named_jobs() -> list[SampleRequest]:
    """Return the jobs of the named mutants.

    Raises:
        ValueError: the text of one does not occur exactly once any more.
    """
    jobs = []
    for named in NAMED:
        source = (ROOT / named.path).read_text()
        if source.count(named.before) != 1:
            raise ValueError(f"'{named.name}': {named.path} holds {named.before!r} {source.count(named.before)} times.")
        content = source.replace(named.before, named.after).encode()
        label = f"named: {named.name}"
        jobs.append(SampleRequest(label=label, path=named.path, content=content, tests=own_tests(named.path)))
    return jobs


def _job(mutant: Mutant) -> SampleRequest:
    source = (ROOT / mutant.path).read_bytes()
    return SampleRequest(
        label=mutant.diff(source), path=mutant.path, content=mutant.apply(source), tests=own_tests(mutant.path)
    )


def _unchanged(paths: dict[tuple[str, ...], str]) -> list[SampleRequest]:
    """Return the jobs of the unchanged tree, one for each set of tests."""
    return [
        SampleRequest(label=f"unchanged {' '.join(tests)}", path=path, content=(ROOT / path).read_bytes(), tests=tests)
        for tests, path in paths.items()
    ]


def _tell(outcome: Outcome) -> None:
    first = outcome.job.label.splitlines()
    change = " | ".join(line for line in first[2:]) if len(first) > 2 else first[0]
    verdict = outcome.by if outcome.killed else "passed"
    _write(f"{outcome.seconds:6.1f} s  {outcome.job.path}  {change}\n          {verdict[:200]}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="mutants to sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", default="", help="sample from paths that hold this text")
    parser.add_argument("--named-only", action="store_true", help="run the named mutants alone")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the unchanged tree first")
    parser.add_argument("--processes", type=int, default=1, help="mutants at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds a mutant's tests may take")
    parser.add_argument("--threshold", type=float, default=0.95, help="share of sampled mutants that must be killed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
