"""Files for other programs are what these programs take, and name no key that these would pass over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.cli.deploy._models import DeploymentConfig
from prefect.events.schemas.automations import AutomationCore
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from tests.conftest import ROOT
from tests.support.schemas import closed, misspelled, stored

TEMPLATES = ROOT / "docs" / "templates"
DEPLOYMENTS = yaml.safe_load((ROOT / "flows" / "prefect.yaml").read_text())["deployments"]
#: The variables of a worker, with those that ``flowmill deploy --image`` adds.
JOBS = {"process": {}, "docker": {"image": "registry/flowmill:1"}, "kubernetes": {"image": "registry/flowmill:1"}}
SLURM = stored("slurm")

Takes = Callable[[Any], bool]


def of_schema(schema: Any) -> Takes:
    return Draft202012Validator(closed(schema)).is_valid


def of_prefect(model: Any) -> Takes:
    """Return whether a model of Prefect, which ignores what it does not know, knows all there is in data."""

    def takes(data: Any) -> bool:
        try:
            model.model_validate(data, extra="forbid")
        except ValidationError:
            return False
        return True

    return takes


def read(name: str) -> Any:
    return yaml.safe_load((TEMPLATES / name).read_text())


def job_of(kind: str) -> Any:
    reported = [each["work_pool"]["job_variables"] for each in DEPLOYMENTS]
    assert reported == [reported[0]] * len(reported)
    return reported[0] | JOBS[kind]


def worker(kind: str) -> Takes:
    if kind == "process":
        return of_schema(ProcessWorker.get_default_base_job_template()["variables"])
    return of_schema(stored(kind))


#: What: who takes it, and the last of a path where names are the writer's own: variables, labels, resources.
FILES: dict[str, tuple[Any, Takes, str]] = {
    "skypilot.yaml": (read("skypilot.yaml"), of_schema(stored("skypilot")), r"envs\.\w+"),
    "trainjob.yaml": (read("trainjob.yaml"), of_schema(stored("trainjob")), r".*\.limits\.nvidia\.com/gpu"),
    **{
        f"automations.yaml {number}": (each, of_prefect(AutomationCore), r"trigger\.match(_related)?\..*")
        for number, each in enumerate(read("automations.yaml")["automations"])
    },
    **{
        f"prefect.yaml {each['name']}": (each, of_prefect(DeploymentConfig), r"(parameters|.*\.job_variables)\..*")
        for each in DEPLOYMENTS
    },
    **{f"job of {kind}": (job_of(kind), worker(kind), r"env\.\w+") for kind in JOBS},
}


@pytest.mark.parametrize("label", FILES)
def test_a_file_is_taken_and_with_any_key_misspelled_is_not(label: str) -> None:
    data, takes, own = FILES[label]
    assert takes(data)
    passed_over = [path for path, changed in misspelled(data) if takes(changed)]
    assert [path for path in passed_over if not re.fullmatch(own, path)] == []


def test_a_value_of_another_type_is_not_taken() -> None:
    job, takes, _ = FILES["trainjob.yaml"]
    assert not takes(job | {"spec": job["spec"] | {"trainer": job["spec"]["trainer"] | {"numNodes": "2"}}})
    task, takes, _ = FILES["skypilot.yaml"]
    assert not takes(task | {"num_nodes": "2"})
    assert not takes(task | {"resources": {"accelerators": {"H100": [8]}}})


def unknown_to_slurm(script: str) -> set[str]:
    """Return what a batch script names that Slurm's manual pages do not: options of sbatch and srun, variables."""
    (agents,) = re.findall(r'^agents="(.*)"$', script, re.MULTILINE)
    srun, *options = shlex.split(agents.replace(",", " "))
    assert srun == "srun"
    asked = {f"sbatch --{name}" for name in re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)}
    asked |= {f"srun {each.partition('=')[0]}" for each in options}
    asked |= set(re.findall(r"\bSLURM\w+|\bSRUN_\w+", re.sub(r"^#.*$", "", script, flags=re.MULTILINE)))
    known = {f"{command} --{name}" for command in ("sbatch", "srun") for name in SLURM[command]}
    return asked - known - {*SLURM["variables"]}


def test_the_slurm_job_is_what_slurm_knows() -> None:
    script = (TEMPLATES / "slurm.sh").read_text()
    assert unknown_to_slurm(script) == set()
    for right, wrong, reported in (
        ("--cpus-per-task=64", "--cpu-per-task=64", "sbatch --cpu-per-task"),
        ("--kill-on-bad-exit", "--kill-on-error", "srun --kill-on-error"),
        ("$SLURM_NNODES", "$SLURM_NODES", "SLURM_NODES"),
    ):
        assert unknown_to_slurm(script.replace(right, wrong)) == {reported}


def test_the_sky_sets_what_its_task_reads() -> None:
    named = set(re.findall(r"SKYPILOT_\w+", (TEMPLATES / "skypilot.yaml").read_text()))
    assert len(named) == 4
    assert named <= {*stored("skypilot")["variables"]}
