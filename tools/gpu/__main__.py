"""``make gpu``: what a first run on an accelerator needs to know, in ten minutes; nothing is downloaded.

``python -m tools.gpu [PART ...] [--short] [--simulated] [--json FILE]``: a table of Markdown on standard output, the
same as JSON in a file, and an exit code that says whether all that must hold does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

from flowmill.configs.user_directories import user_cache
from flowmill.flows.environment import prepare_environment
from flowmill.models.devices import chosen_device, make_current
from flowmill.models.library_loading import quiet_libraries
from tools.accelerator import missing, simulated
from tools.gpu import families, memory, pipelines, ranks, speed
from tools.gpu.about import header
from tools.gpu.lines import Line, Lines
from tools.gpu.waiting import Waiting

PARTS = ("memory", "speed", "pipelines", "families", "ranks")


def main() -> int:
    """Measure, print, and say whether all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these")
    parser.add_argument("--short", action="store_true", help="few families, few blocks, small images")
    parser.add_argument("--simulated", action="store_true", help="on a simulated device, where there is none")
    parser.add_argument("--device", default="auto", help="kind of device")
    parser.add_argument("--json", type=Path, help="file for the same lines as JSON")
    options = parser.parse_args()
    prepare_environment()
    quiet_libraries()
    warnings.simplefilter("ignore")
    counts = None
    if options.simulated:
        reason = missing()
        if reason is not None:
            sys.stderr.write(f"There is no simulated device: {reason}.\n")
            return 2
        counts = simulated(user_cache() / f"simulated-{torch.__version__}", doubles=True)
    device = chosen_device(options.device)
    if device.type == "cpu":
        sys.stderr.write("This machine has no accelerator. Try --simulated --short.\n")
        return 2
    make_current(device)
    begun, lines = time.perf_counter(), Lines()
    # All ranks are processes of their own, and those have no simulated device.
    wanted = options.parts or [part for part in PARTS if part != "ranks" or not options.simulated]
    for part in wanted:
        started = time.perf_counter()
        if part == "memory":
            memory.measure(device, lines, short=options.short)
        elif part == "speed":
            speed.measure(device, lines, short=options.short)
        elif part == "pipelines":
            pipelines.measure(device, lines, short=options.short)
        elif part == "families":
            families.measure(device, Waiting(counts), lines, short=options.short)
        else:
            ranks.measure(device, lines, count=torch.accelerator.device_count())
        lines.append(Line(label=f"seconds of part '{part}'", measured=time.perf_counter() - started))
    about = [*header(device), f"- {time.perf_counter() - begun:.0f} s in all"]
    sys.stdout.write("\n".join([*about, "", lines.markdown()]) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "lines": lines.as_data()}, indent=2) + "\n")
    return 0 if lines.good else 1


if __name__ == "__main__":
    sys.exit(main())
