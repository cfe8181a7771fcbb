"""Policies: one adapter per model family.

A new family is one file here with a class derived from ``base.Policy``, and one line in the table.
"""

POLICIES = {
    "sd3": "models.policies.sd3:SD3",
}
