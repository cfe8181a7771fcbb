"""The peak memory of a process is its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from flowmill.tasks.runtime.process_memory import process_peak
from tests.conftest import ROOT


def test_the_peak_grows_with_this_process_and_leaves_out_its_parent() -> None:
    before = process_peak()
    held = np.ones(2**25)
    assert process_peak() >= before
    assert process_peak() > held.nbytes
    # Here the parent holds more than a new process needs.
    code = "from flowmill.tasks.runtime.process_memory import process_peak; print(process_peak())"
    own = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert 2**20 < int(own.stdout) < 2**27 < held.nbytes
