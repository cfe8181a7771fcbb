"""Write the schemas next to this file again, from packages and manual pages that know them.

    python -m venv v; v/bin/pip install kubeflow-trainer-api; v/bin/python tests/golden/schemas/collect.py trainjob
    ... skypilot (skypilot), kubernetes (prefect-kubernetes), docker (prefect-docker), one environment each
    python tests/golden/schemas/collect.py slurm 22.05.11=FOLDER 26.05.3=FOLDER

The folders hold ``sbatch.1`` and ``srun.1`` of releases of Slurm: what all of them know is written.
"""

from __future__ import annotations

import json
import re
import sys
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def without_prose(schema: Any) -> Any:
    """Leave out titles and descriptions."""
    if isinstance(schema, dict):
        reported = {name for name in ("title", "description") if isinstance(schema.get(name), str)}
        return {name: without_prose(value) for name, value in schema.items() if name not in reported}
    return [without_prose(each) for each in schema] if isinstance(schema, list | tuple) else schema


def trainjob() -> tuple[str, Any]:
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # type: ignore[import-not-found]

    schema = TrainerV1alpha1TrainJob.model_json_schema()
    # Quantities, which a generator wrote as objects that hold a number or a string.
    held = "actual_instance"
    parts = schema["$defs"].items()
    schema["$defs"] = {name: each.get("properties", {}).get(held, each) for name, each in parts}
    return f"kubeflow-trainer-api {version('kubeflow-trainer-api')}", schema


def skypilot() -> tuple[str, Any]:
    from sky.skylet import constants  # type: ignore[import-not-found]
    from sky.utils import schemas  # type: ignore[import-not-found]

    task = schemas.get_task_schema()
    task["properties"]["resources"] = schemas.get_resources_schema()
    task["variables"] = sorted(value for name, value in vars(constants).items() if name == value)
    return f"skypilot {version('skypilot')}", task


def kubernetes() -> tuple[str, Any]:
    from prefect_kubernetes.worker import KubernetesWorker  # type: ignore[import-not-found]

    return (
        f"prefect-kubernetes {version('prefect-kubernetes')}",
        KubernetesWorker.get_default_base_job_template()["variables"],
    )


def docker() -> tuple[str, Any]:
    from prefect_docker.worker import DockerWorker  # type: ignore[import-not-found]

    return f"prefect-docker {version('prefect-docker')}", DockerWorker.get_default_base_job_template()["variables"]


def slurm(*releases: str) -> tuple[str, Any]:
    folders = [Path(each.partition("=")[2]) for each in releases]
    found = {
        "sbatch": _common(_options(folder / "sbatch.1") for folder in folders),
        "srun": _common(_options(folder / "srun.1") for folder in folders),
        "variables": _common(_variables(folder / "sbatch.1") for folder in folders),
    }
    return "Slurm " + " and ".join(each.partition("=")[0] for each in releases), found


def _common(found: Any) -> Any:
    return sorted(reduce(set.intersection, found))


def _section(page: Path, title: str) -> list[tuple[str, str]]:
    """Return the lines of a section of a manual page, each with the one before it."""
    lines = [re.sub(r"\\f[BIRP]|\\&", "", line).replace(r"\-", "-") for line in page.read_text().splitlines()]
    begin = next(place for place, line in enumerate(lines) if re.match(rf'\.SH "?{title}', line))
    end = next(place for place in range(begin + 1, len(lines)) if lines[place].startswith(".SH"))
    return list(zip(lines[begin:end], lines[begin + 1 : end], strict=False))


def _options(page: Path) -> set[str]:
    """Return the long options that a manual page documents."""
    headed = (line for before, line in _section(page, "OPTIONS") if before.startswith((".TP", ".TQ")))
    return {found[1] for line in headed if (found := re.match(r"(?:-\w, )?--([a-z][a-z-]*)", line))}


def _variables(page: Path) -> set[str]:
    """Return the variables that a batch script is given."""
    headed = (line for before, line in _section(page, "OUTPUT ENVIRONMENT") if before.startswith((".TP", ".TQ")))
    return {name for line in headed for name in re.findall(r"\bSLURM[A-Z]*_[A-Z_]+\b", line)}


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    source, schema = {
        "trainjob": trainjob, "skypilot": skypilot, "kubernetes": kubernetes, "docker": docker, "slurm": slurm
    }[name](*rest)  # fmt: skip
    text = json.dumps({"source": source, "schema": without_prose(schema)}, separators=(",", ":"), sort_keys=True)
    (HERE / f"{name}.json").write_text(f"{text}\n")
