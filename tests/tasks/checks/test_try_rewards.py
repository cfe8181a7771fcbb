"""Rewards are tried before any sampling, and what is wrong with one is said with its place."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.models.rewards.base import Batch, Needs, Origin
from flowmill.models.rewards.factory import RewardCache
from flowmill.models.rewards.invocation import score
from flowmill.models.rewards.service import wire
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.try_rewards import time_rewards, try_rewards
from flowmill.tasks.modalities.media import trial_media
from flowmill.tasks.specs.plan import RunPlan
from tests.support.inside import Make
from tests.support.serving import answering

Prompts = Sequence[str]
Metadata = Sequence[Mapping[str, Any]]


class Recording:
    """Writes down what it is given."""

    calls: ClassVar[list[tuple[tuple[int, ...], str, list[str], list[Any]]]] = []

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        self.calls.append((media.shape, str(media.dtype), list(prompts), [dict(item) for item in metadata]))
        return [1.0] * len(media)


class Large:
    """Expects images of another size."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> np.ndarray:
        return np.asarray(media.reshape(len(media), 512, 512, 3).mean((1, 2, 3)))


class Picky:
    """Cannot score one of the prompts."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        return [{"a": 1.0, "b": 0.5}[prompt] for prompt in prompts]


class Paired:
    """Needs exactly one sample."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        if len(prompts) > 1:
            raise ValueError("one at a time")
        return [1.0]


class Columns:
    """Returns two scores per sample."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> np.ndarray:
        return np.ones((len(media), 2))


class Mean:
    """Returns one score for all."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> float:
        return float(media.mean())


class Lost:
    """Loses the connection some times."""

    left: ClassVar[int] = 0

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        type(self).left -= 1
        if self.left >= 0:
            raise ConnectionResetError("peer went away")
        return [1.0] * len(media)


class Missing:
    """Reads a file that is not there."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        raise FileNotFoundError(2, "No such file or directory", "weights.bin")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def named(reward: type, **more: Any) -> str:
    options = ", ".join(f"{key}: {value}" for key, value in more.items())
    name = f"{__name__}:{reward.__name__}"
    return f"{{name: '{name}', label: mine{', ' + options if options else ''}}}"


def test_each_is_scored_once_with_media_of_the_configured_size_and_a_real_prompt(
    make_config: Make, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a cat", "count": 3}\n{"prompt": "a dog", "count": 1}\n')
    overrides = [f"prompts.train={tmp_path / 'train.jsonl'}", "rollout.prompts_per_epoch=2"]
    judge = "{name: 'tests.tasks.checks.test_try_rewards:Recording', label: judge}"
    Recording.calls.clear()
    made = try_rewards(RunPlan(make_config(*overrides, f"rewards=[{named(Recording)}]", f"evaluate.judges=[{judge}]")))
    assert len(made) == 1, "two labels of one reward share it"
    image, (first, judged) = (2, 16, 32, 3), Recording.calls
    assert first == (image, "uint8", ["a cat", "a dog"], [{"count": 3}, {"count": 1}])
    assert judged[0] == image
    assert judged[2][0] == '"90"'


@pytest.mark.parametrize(
    ("frames", "shape"), [("clip", (2, 5, 16, 32, 3)), ("first", (2, 16, 32, 3)), ("2", (6, 16, 32, 3))]
)
def test_clips_are_handed_over_as_configured(
    make_config: Make, config_file: Path, frames: str, shape: tuple[int, ...]
) -> None:
    Recording.calls.clear()
    config = make_config("model.frames=5", f"rewards=[{named(Recording, frames=frames)}]")
    assert trial_media(config).shape == (1, 5, 16, 32, 3)
    try_rewards(RunPlan(config))
    assert [call[0] for call in Recording.calls] == [shape]


def test_a_wrong_shape_is_told_with_the_right_one_and_a_log_of_the_traceback(make_config: Make, state: Path) -> None:
    with pytest.raises(RewardError) as error:
        try_rewards(RunPlan(make_config(f"rewards=[{named(Large)}]")))
    message = str(error.value)
    assert message.startswith("Reward 'mine' failed for prompt '\"00\"' (sample made up for the trial, shard none yet")
    assert "ValueError: cannot reshape array of size 3072" in message
    assert (
        "media of shape (2, 16, 32, 3), (B, H, W, 3) images in uint8, and must return scores of shape (2,)" in message
    )
    (log,) = (state / "flowmill" / "logs").iterdir()
    assert str(log) in message
    assert "media.reshape(len(media), 512, 512, 3)" in log.read_text()
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Columns, "returned an ndarray of shape (2, 2) in float64 for"),
        (Mean, "must return scores of shape (2,): one number per sample"),
        (Missing, "FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'. Reward 'mine' raised it."),
    ],
)
def test_what_is_no_score_is_refused(make_config: Make, reward: type, expected: str) -> None:
    with pytest.raises(RewardError, match=re.escape(expected)):
        try_rewards(RunPlan(make_config(f"rewards=[{named(reward)}]")))


def test_a_lost_connection_is_tried_again_as_often_as_a_shard_would_be(make_config: Make) -> None:
    waits: list[float] = []
    config = make_config(f"rewards=[{named(Lost)}]", "execution.retries=2", "execution.retry_delay_s=3")
    Lost.left = 2
    try_rewards(RunPlan(config), sleep=waits.append)
    assert waits == [3.0, 6.0]
    Lost.left = 3
    with pytest.raises(RewardError, match=r"ConnectionResetError: peer went away\. Reward 'mine' raised it\."):
        try_rewards(RunPlan(config), sleep=waits.append)
    assert waits == [3.0, 6.0, 3.0, 6.0]


IMAGES = np.zeros((3, 4, 4, 3), np.uint8)
ORIGIN = Origin(samples=("s0", "s1", "s2"), shard="000000-000001 of trajectories/ab")
BATCH = Batch(media=IMAGES, prompts=["a", "b", "c"], metadata=[{}] * 3, origin=ORIGIN)


def test_the_sample_that_fails_is_found() -> None:
    expected = "failed for prompt 'c' (sample s2, shard 000000-000001 of trajectories/ab): KeyError: 'c'"
    with pytest.raises(RewardError, match=re.escape(expected)):
        score(Picky(), "picky", BATCH)


def test_a_failure_of_all_together_is_told_as_one() -> None:
    expected = "failed for 3 samples together, though for none of them alone (samples from s0, shard"
    with pytest.raises(RewardError, match=re.escape(expected)):
        score(Paired(), "paired", BATCH)


def test_a_lost_connection_stays_one_and_carries_its_place() -> None:
    Lost.left = 1
    with pytest.raises(ConnectionResetError) as error:
        score(Lost(), "lost", BATCH)
    assert error.value.__notes__[0].startswith("Reward 'lost' raised it. Traceback: ")


def test_the_log_goes_elsewhere_where_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(RewardError):
        score(Picky(), "picky", BATCH)
    (log,) = (tmp_path / "temporary").rglob("reward-picky-*.log")
    assert "KeyError: 'c'" in log.read_text()


def written(to: BaseHTTPRequestHandler, body: bytes) -> None:
    to.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)


@pytest.mark.parametrize("place", ["rewards", "monitors", "evaluate.judges"])
@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(media="texts"), "scores texts, but model.policy 'sd3' makes images"),
        (Needs(media="latents"), "scores latents, which are not kept"),
        (Needs(media="sounds"), "scores sounds, but samples of model.policy 'sd3' have none"),
        (Needs(media="clips"), "scores whole clips, but its 'frames' is 1"),
        (Needs(columns=("entry",)), "needs the column 'entry' of the prompt source"),
        (Needs(references=True), "compares with the images that prompts start from"),
    ],
    ids=lambda value: value.media if isinstance(value, Needs) else "",
)
def test_what_a_served_reward_needs_is_checked(make_config: Make, place: str, needs: Needs, said: str) -> None:
    info = {"name": "mine:only_there", "options": {}, "needs": wire.needs_fields(needs), "perfect": None}
    body = json.dumps({**info, "max_bytes": 1000}).encode()
    with answering(lambda to: written(to, body)) as url:
        served = f"{{name: 'mine:only_there', server: {{url: '{url}', patience_s: 0}}}}"
        with pytest.raises(ConfigError, match=re.escape(said)):
            try_rewards(RunPlan(make_config(f"{place}=[{served}]")))


def test_rewards_of_the_ranks_are_not_made_in_the_process_that_starts_them(make_config: Make) -> None:
    reward = 'rewards=[{name: "tests.support.rewards:OnAccelerator", label: bright}]'
    assert len(try_rewards(RunPlan(make_config(reward)))) == 1
    assert len(try_rewards(RunPlan(make_config(reward, "execution.processes=2")))) == 0
    accelerated = 'rewards=[{name: "tests.support.rewards:OnAccelerator", options: {gain: 2}}]'
    with pytest.raises(ConfigError, match="has no option 'gain'"):
        try_rewards(RunPlan(make_config(accelerated, "execution.processes=2")))


def test_checking_a_config_loads_no_large_model(make_config: Make) -> None:
    reward = 'rewards=[{name: "tests.support.rewards:OnAccelerator", label: bright}, {name: jpeg_compressibility}]'
    assert len(try_rewards(RunPlan(make_config(reward)), load=False)) == 1
    # Nor asks for one that is nowhere.
    nowhere = "rewards=[{name: pickscore, options: {model: nobody/nothing}}]"
    assert len(try_rewards(RunPlan(make_config(nowhere)), load=False)) == 0
    with pytest.raises(ConfigError, match="has no option 'modle'"):
        try_rewards(RunPlan(make_config("rewards=[{name: pickscore, options: {modle: x}}]")), load=False)


class Slow:
    """Takes a tenth of a second for each sample."""

    def score(self, media: np.ndarray, prompts: Prompts, metadata: Metadata) -> list[float]:
        time.sleep(0.1 * len(media))
        return [1.0] * len(media)


def test_how_long_scoring_takes_is_estimated(make_config: Make) -> None:
    """16 samples an epoch; of rewards that a server gives, or that work on an accelerator, nothing is known."""
    others = "{name: clip_score}, {name: jpeg_compressibility, label: far, server: 'http://127.0.0.1:9'}"
    config = make_config(f"rewards=[{named(Slow)}]", "execution.score_workers=3")
    (mine,) = time_rewards(RunPlan(config), try_rewards(RunPlan(config)), check_config(config, rewards=False))
    assert (mine.reward, mine.samples, mine.workers) == ("mine", 16, 3)
    assert 0.1 <= mine.seconds < 0.2
    config = make_config(f"rewards=[{named(Slow)}]", f"monitors=[{others}]")
    found = time_rewards(RunPlan(config), RewardCache(), check_config(config, rewards=False))
    assert [each.reward for each in found] == ["mine"]
