"""What a stage is (identity, chain, staleness) must import nothing heavy by itself: without an import hook, no torch."""

import subprocess
import sys

heavy = {}
for module in (
    "flowmill.tasks.specs.graph",
    "flowmill.tasks.specs.identity",
    "flowmill.tasks.runs.chain",
    "flowmill.tasks.runs.staleness",
):
    code = f"import sys, {module}; print(','.join(n for n in ('torch', 'pyarrow') if n in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if found.returncode:
        print(found.stderr[-500:])
        print(f"{module} cannot be imported")
        sys.exit(2)
    heavy[module] = found.stdout.strip()
bad = {m: h for m, h in heavy.items() if "torch" in h}
print("imported along: " + "; ".join(f"{m}: {h or 'nothing heavy'}" for m, h in heavy.items()))
sys.exit(1 if bad else 0)
