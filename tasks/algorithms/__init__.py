"""Algorithms: one small file each.

A new algorithm is one file here with a class that fulfils ``base.Algorithm``, and one line in the table.
"""

ALGORITHMS = {
    "grpo": "tasks.algorithms.grpo:GRPO",
}
