"""Does everything that reports on a run agree with a fresh run of the same config, whatever was done to the run?

``python -m tests.support.agreement`` finishes a run, then forces a stage, scores with another reward, evaluates on
other prompts, lowers and raises the number of epochs. After each step, status, the registry and MLflow must equal those
of a fresh run of the config, or status must say that something is stale. Real processes, real MLflow; some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flowmill.flows.environment import prepare_environment

RUN = "small"
REWARD = "tests.support.rewards:Restless"


def main() -> None:
    """Do every step and compare."""
    prepare_environment()
    from flowmill.flows.server import LocalApi

    api = LocalApi()
    try:
        os.environ["PREFECT_API_URL"] = api.wait()
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(any([not agrees for agrees in _steps(Path(folder))]))
    finally:
        api.stop()


def _steps(folder: Path) -> list[bool]:
    store, config = folder / "store", _config(folder)
    root = ["--root", str(store)]
    flowmill("run", str(config), *root)
    found = [_compare("a finished run", folder, store, config, 3)]
    stage = ["stage", "score", "--run", RUN, "--epoch", "3"]
    flowmill(*stage, "--force", *root)
    found.append(_compare("score of epoch 3 forced, equal content", folder, store, config, 3))
    flowmill(*stage, "--set", "rewards=[{name: jpeg_compressibility, options: {scale: 1}, label: kb}]", *root)
    found.append(_compare("epoch 3 scored with another reward", folder, store, config, 3))
    flowmill("run", str(config), *root)
    found.append(_compare("run again", folder, store, config, 3))
    flowmill("run", str(config), *root, "--set", "run.epochs=2")
    found.append(_compare("fewer epochs", folder, store, config, 2))
    flowmill("run", str(config), *root, "--set", "run.epochs=4")
    found.append(_compare("more epochs", folder, store, config, 4))
    other = folder / "other.txt"
    other.write_text('"55"\n"66"\n')
    evaluate = ["stage", "evaluate", "--run", RUN, "--epoch", "4", "--name", "other"]
    flowmill(*evaluate, "--set", f"prompts.heldout={other}", *root)
    found.append(_compare("an evaluation on other prompts", folder, store, config, 4))
    restless = [*root, "--set", f"rewards=[{{name: '{REWARD}'}}]", "--name", "restless", "--set", "run.epochs=2"]
    flowmill("run", str(config), *restless)
    flowmill("stage", "score", "--run", "restless", "--epoch", "1", "--force", *root)
    states = {each["state"] for each in _status(store, "restless")["stages"]}
    _say("a judge that says something else when asked again", "says stale" if "stale" in states else "SILENT")
    found.append("stale" in states)
    flowmill("run", str(config), *restless)
    states = {each["state"] for each in _status(store, "restless")["stages"]}
    curve = _curves(store, "restless")["reward/mean"]
    _say("and the run after it", f"{', '.join(sorted(states))}; reward/mean at epochs {sorted(curve)}")
    found.append(states == {"fresh"} and sorted(curve) == [1, 2])
    return found


def _compare(step: str, folder: Path, store: Path, config: Path, epochs: int) -> bool:
    """Compare everything that reports on the run with a fresh run, or see that status says stale."""
    fresh = folder / f"fresh-{epochs}"
    if not fresh.exists():
        flowmill("run", str(config), "--root", str(fresh), "--set", f"run.epochs={epochs}")
    ours, theirs = _status(store, RUN), _status(fresh, RUN)
    if any(each["state"] == "stale" for each in ours["stages"]):
        _say(step, "says stale")
        return True
    parts = {
        "status": [ours[key] == theirs[key] for key in ("evaluations", "rewards", "advantages", "finished_epochs")],
        "digest": [_digest(store) == _digest(fresh)],
        "registry": [_champion(store) == _champion(fresh)],
        "MLflow": [_curves(store, RUN) == _curves(fresh, RUN)],
    }
    wrong = [name for name, equal in parts.items() if not all(equal)]
    _say(step, f"DIFFERS in {', '.join(wrong)}" if wrong else "agrees")
    return not wrong


def _config(folder: Path) -> Path:
    (folder / "train.txt").write_text("".join(f'"{n:02d}"\n' for n in range(16)))
    (folder / "heldout.txt").write_text("".join(f'"{n:02d}"\n' for n in range(90, 96)))
    config: dict[str, Any] = {
        "run": {"name": RUN, "epochs": 3},
        "model": {
            "policy": "sd3",
            "build": {"name": "digits", "options": {"steps": 20, "vae_steps": 20, "images": 500}},
            "height": 16,
            "width": 32,
            "options": {"max_sequence_length": 1, "schedule": "linear"},
        },
        "prompts": {"train": "train.txt", "heldout": "heldout.txt"},
        "rollout": {"prompts_per_epoch": 4, "group_size": 4, "steps": 3, "groups_per_shard": 2},
        "rewards": [{"name": "jpeg_compressibility"}],
        "optimize": {"learning_rate": 1e-3, "algorithm": {"name": "grpo", "options": {"clip_range": 0.002}}},
        "evaluate": {"every": 1, "samples": 8, "images": 4},
        "execution": {"rollout_batch_size": 16, "micro_batch_size": 16},
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def flowmill(*arguments: str) -> str:
    """Run the command and return what it printed; end with its message if it fails."""
    command: Sequence[str] = [sys.executable, "-m", "flowmill.flows.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout


def _status(store: Path, run: str) -> dict[str, Any]:
    return dict(json.loads(flowmill("status", run, "--root", str(store), "--json")))


def _digest(store: Path) -> str:
    return flowmill("store", "digest", RUN, "--root", str(store))


def _champion(store: Path) -> dict[str, str]:
    from flowmill.tasks.tracking.client import open_client

    tags = open_client(str(store), None).get_model_version_by_alias(f"flowmill-{RUN}", "champion").tags
    return {key: tags[key] for key in ("flowmill.epoch", "flowmill.digest", "flowmill.heldout_reward")}


def _curves(store: Path, run: str) -> dict[str, dict[int, list[float]]]:
    """Return every curve of the MLflow run but times and the machine's load: step -> values."""
    from flowmill.tasks.tracking.client import open_client

    client = open_client(str(store), None)
    run_id = _status(store, run)["tracking"]["mlflow_run_id"]
    curves: dict[str, dict[int, list[float]]] = {}
    for key in client.get_run(run_id).data.metrics:
        if not key.startswith(("time/", "system/", "eval-")):
            for point in client.get_metric_history(run_id, key):
                curves.setdefault(key, {}).setdefault(point.step, []).append(point.value)
    return curves


def _say(step: str, outcome: str) -> None:
    sys.stdout.write(f"{step}: {outcome}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
