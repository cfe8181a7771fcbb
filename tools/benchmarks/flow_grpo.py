"""Runs Flow-GRPO's own training function, from a checkout of July 2025, on the tiny work of ``tools.benchmarks.peers``.

``python -m tools.benchmarks.flow_grpo CHECKOUT BASE FOLDER EPOCHS`` prints what every epoch but the first took: CPU
seconds and rows of its denoiser. Nothing of the checkout is changed: what it imports and does not need here (flags,
configs, a tracker) is stood in for. Its data loader's workers are not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import runpy
import sys
import time
import types
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.benchmarks.work import PROMPTS, WORK, Rows


class Settings(dict[str, Any]):
    """A config whose entries are attributes too."""

    __setattr__ = dict.__setitem__

    def __getattr__(self, name: str) -> Any:
        """Return an entry."""
        return self[name]


class Epochs(int):
    """What the loop asks before an epoch whether it evaluates: it never does, and it ends here."""

    marks: list[dict[str, float]]
    rows: Rows

    def __rmod__(self, epoch: int) -> int:
        """Note time and rows; end after the last epoch."""
        self.marks.append({"cpu": time.process_time(), **self.rows.counted()})
        if len(self.marks) > self:
            raise Done
        return 1


class Done(Exception):
    """The epochs are trained."""


def main(checkout: Path, base: str, folder: Path, epochs: int) -> None:
    """Train and print what it took."""
    rows = Rows()
    # What looks for trackers has looked before the stand-ins are there.
    import_module("accelerate")
    stand_in()
    sys.path.insert(0, str(checkout))
    settings = config(base, folder, epochs)
    settings.eval_freq.rows = rows
    script = runpy.run_path(str(checkout / "scripts" / "train_sd3.py"))
    script["FLAGS"].config = settings
    os.chdir(folder)
    with contextlib.suppress(Done):
        script["main"](None)
    marks = settings.eval_freq.marks[1:]
    taken = [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(marks)]
    sys.stdout.write(json.dumps(taken) + "\n")


def stand_in() -> None:
    """Stand in for modules of command lines, configs and trackers."""
    made = {name: types.ModuleType(name) for name in ("absl", "ml_collections", "wandb")}
    flags: Any = types.SimpleNamespace(FLAGS=types.SimpleNamespace())
    vars(made["absl"]).update(app=types.SimpleNamespace(run=None), flags=flags)
    flagged = types.SimpleNamespace(DEFINE_config_file=lambda *_: None)
    vars(made["ml_collections"]).update(ConfigDict=Settings, config_flags=flagged)
    quiet = types.SimpleNamespace(init=lambda **_: None, log=lambda *_, **__: None, Image=lambda *_, **__: None)
    vars(made["wandb"]).update(vars(quiet))
    sys.modules.update(made)


def config(base: str, folder: Path, epochs: int) -> Settings:
    """Return the checkout's own defaults, set to the work."""
    made: Settings = import_module("config.base").get_config()
    (folder / "train.txt").write_text("\n".join(PROMPTS))
    (folder / "test.txt").write_text(PROMPTS[0])
    groups, size, batch = WORK["prompts_per_epoch"], WORK["group_size"], WORK["batch"]
    batches = groups * size // batch
    stop = Epochs(epochs)
    stop.marks = []
    made.update(
        run_name="peers",
        logdir=str(folder),
        mixed_precision="no",
        eval_freq=stop,
        save_freq=10**9,
        dataset=str(folder),
        resolution=WORK["size"],
        prompt_fn="general_ocr",
        reward_fn={"jpeg_compressibility": 1.0},
    )
    made.pretrained.model = base
    made.sample.update(
        num_steps=WORK["steps"],
        guidance_scale=WORK["guidance_scale"],
        train_batch_size=batch,
        num_image_per_prompt=size,
        test_batch_size=1,
        num_batches_per_epoch=batches,
    )
    made.train.update(
        batch_size=batch,
        gradient_accumulation_steps=batches // WORK["updates_per_epoch"],
        timestep_fraction=(WORK["steps"] - 0.5) / WORK["steps"],
        learning_rate=WORK["learning_rate"],
    )
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
