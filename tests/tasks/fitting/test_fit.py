"""Fitted rewards: what they learn, what decides their identity, and judgments that cannot be used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.reward_fit import load_fit
from flowmill.flows.cli import app
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.fitted import ADAPTERS
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.garbage_collection import Retention, plan_removals
from flowmill.storage.maintenance.verify import verify_store
from flowmill.tasks.fitting import fit as fitting
from flowmill.tasks.fitting.figures import figures_of_preferences
from flowmill.tasks.fitting.fit import check_copy, copy_model, fit_reward
from flowmill.tasks.fitting.judgments import Judgment
from flowmill.tasks.fitting.splits import check_leaks, held_out
from tests.support.judged import HELDOUT, PIXELS, fit_config, write_fitted, write_images, write_pairs, write_rows

Row = Mapping[str, Any]


def pictures(folder: Path, numbers: Sequence[int]) -> np.ndarray:
    return np.stack([np.asarray(Image.open(folder / f"{number}.png")) for number in numbers])


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preferences by a rule, with some ties."""
    folder = tmp_path_factory.mktemp("judged")
    write_pairs(folder, 600, ties=0.01)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of few preferences."""
    return write_pairs(tmp_path_factory.mktemp("few"), 110)


@pytest.mark.parametrize("ties", ["half", "davidson"])
def test_a_rule_is_learned_and_measured(judged: Path, tmp_path: Path, ties: str) -> None:
    made = fit_reward(fit_config(tmp_path, judged / "pairs.jsonl", ties=ties))
    found = made.summary["heldout"]
    assert found["accuracy"]["low"] > 0.85
    assert found["accuracy"]["mean"] > 0.9
    assert found["accuracy"]["unit"] == "prompts"
    assert set(found["raters"]) == {"ada", "bob", "cy"}
    assert (
        sum(each["judgments"] for each in found["raters"].values()) == made.summary["data"]["heldout"] - found["ties"]
    )
    assert sum(row["count"] for row in found["calibration"]) == made.summary["data"]["heldout"]
    assert made.summary["curve"][-1]["train"] < 0.7 * made.summary["curve"][0]["train"]
    assert (made.summary["ties"] is not None) == (ties == "davidson")
    assert "held-out" in (made.folder / "README.md").read_text().lower()
    reward = make_reward("fitted", {"path": str(made.folder)})
    rows = [json.loads(line) for line in (judged / "pairs.jsonl").read_text().splitlines()]
    sides = [
        np.asarray(reward.score(pictures(judged, [int(row[side][:-4]) for row in rows]), [""] * 600, []).values)
        for side in ("chosen", "rejected")
    ]
    assert (sides[0] > sides[1]).mean() > 0.9


def test_random_judgments_teach_nothing(tmp_path: Path) -> None:
    made = fit_reward(fit_config(tmp_path, write_pairs(tmp_path, 400, random=True), share=0.4))
    found = made.summary["heldout"]["accuracy"]
    assert found["low"] < 0.5 < found["high"]


def test_ratings_are_regressed(tmp_path: Path) -> None:
    left = write_images(tmp_path, 800)
    ratings = np.clip(np.round(5 + 40 * left), 0, 10)
    rows = [
        {"prompt": str(number), "image": f"{number}.png", "rating": rating, "rater": "ada"}
        for number, rating in enumerate(ratings.tolist())
    ]
    made = fit_reward(fit_config(tmp_path, write_rows(tmp_path / "ratings.jsonl", rows), scale=(0, 10), updates=200))
    found = made.summary["heldout"]
    assert found["accuracy"]["mean"] > 0.85
    assert found["error"] < 0.6 * found["deviation"]
    # One rating per prompt: no interval over prompts shows that the reward is better than chance.
    reward = make_reward("fitted", {"path": str(made.folder), "unproven": True})
    scores = reward.score(pictures(tmp_path, range(100)), [""] * 100, [])
    assert np.abs(np.asarray(scores.values) - ratings[:100]).mean() < 1.5


def test_a_fit_that_diverges_names_the_learning_rate(few: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"scores are not finite\. Lower 'learning_rate' \(1e\+30\)"):
        fit_reward(fit_config(tmp_path, few, learning_rate=1e30, updates=20))


def test_the_same_judgments_give_the_same_bytes_wherever_they_are(few: Path, tmp_path: Path) -> None:
    first = fit_reward(fit_config(tmp_path / "a", few, updates=3))
    again = fit_reward(fit_config(tmp_path / "a", few, updates=3))
    assert (first.new, again.new) == (True, False)
    other = fit_reward(fit_config(tmp_path / "b", few, updates=3))
    assert other.ref == first.ref
    digests = {ArtifactStore(str(tmp_path / name / "store")).require(first.ref).digest for name in "ab"}
    assert len(digests) == 1
    for changed in ({"seed": 1}, {"updates": 4}, {"share": 0.3}, {"ties": "davidson"}):
        assert fit_reward(fit_config(tmp_path / "a", few, **{"updates": 3, **changed})).ref != first.ref


def test_after_a_kill_the_same_model_is_committed(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit_reward(fit_config(tmp_path / "whole", few, updates=3))
    with monkeypatch.context() as patched:
        for name in ("save_file", "card"):
            patched.setattr(fitting, name, lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                fit_reward(fit_config(tmp_path / "killed", few, updates=3))
        patched.undo()
        patched.setattr(ArtifactStore, "seal", lambda *given, **origin: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit_reward(fit_config(tmp_path / "killed", few, updates=3))
    monkeypatch.setattr(fitting, "_write", lambda *given: pytest.fail("a committed fit is not repeated"))
    resumed = fit_reward(fit_config(tmp_path / "killed", few, updates=3))
    stores = [ArtifactStore(str(tmp_path / name / "store")) for name in ("whole", "killed")]
    assert len({store.require(whole.ref).digest for store in stores}) == 1
    assert resumed.ref == whole.ref
    assert verify_store(stores[1], deep=True)["problems"] == []


def test_a_store_keeps_it_although_no_run_names_it(few: Path, tmp_path: Path) -> None:
    fit_reward(fit_config(tmp_path, few, updates=1))
    store = ArtifactStore(str(tmp_path / "store"))
    assert plan_removals(store, Retention(older_than_s=0)) == []
    damaged = next((tmp_path / "store" / "reward_models").glob("*/model-*/head.safetensors"))
    damaged.write_bytes(b"other")
    assert "head.safetensors" in verify_store(store, deep=True)["problems"][0]


def test_a_copy_replaces_its_own_files_only(few: Path, tmp_path: Path) -> None:
    first, second = (fit_reward(fit_config(tmp_path, few, updates=each)) for each in (1, 2))
    for made in (first, second):
        check_copy(tmp_path / "mine")
        copy_model(made, tmp_path / "mine")
        held = {file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir()}
        assert held == {file.name: file.read_bytes() for file in made.folder.iterdir()}
    # An earlier copy may have files that this one has none of.
    (tmp_path / "mine" / ADAPTERS).write_bytes(b"of before")
    copy_model(first, tmp_path / "mine")
    assert not (tmp_path / "mine" / ADAPTERS).exists()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for write in (check_copy, partial(copy_model, first)):
        with pytest.raises(ConfigError, match="is not empty"):
            write(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"


def judgment(prompt: str, *items: str, value: float = 1.0) -> Judgment:
    return Judgment(prompt=prompt, items=items, value=value, rater="", source="file", where="file, row 1")


def test_what_is_held_out_shares_nothing_with_what_is_trained_on() -> None:
    draw = np.random.default_rng(0)
    rows = [judgment(f"p{number // 3}", f"a{draw.integers(2000)}", f"b{number}") for number in range(300)]
    apart = held_out(rows, 0.2, 0)
    sides = [
        {each for row, out in zip(rows, apart, strict=True) if out == side for each in (row.prompt, *row.items)}
        for side in (False, True)
    ]
    assert sides[0] & sides[1] == set()
    assert 20 <= sum(apart) <= 60
    order = draw.permutation(300)
    moved = held_out([rows[number] for number in order], 0.2, 0)
    assert [moved[list(order).index(number)] for number in range(300)] == apart
    assert held_out(rows, 0.2, 1) != apart


def test_of_one_connected_set_nothing_can_be_held_out() -> None:
    with pytest.raises(ConfigError, match=r"0 to measure on.*has 100 of 100"):
        held_out([judgment("the same", f"a{number}", f"b{number}") for number in range(100)], 0.2, 0)


def test_short_texts_that_answer_many_prompts_do_not_bind_them_together() -> None:
    rows = [judgment(f"p{number // 2}", f"{number % 7}", f"{(number + 1) % 7}") for number in range(120)]
    with pytest.raises(ConfigError, match="has 120 of 120"):
        held_out(rows, 0.2, 0)
    apart = held_out(rows, 0.2, 0, texts=True)
    train, held = ([row for row, out in zip(rows, apart, strict=True) if out == side] for side in (False, True))
    assert len(held) == 24
    assert {row.prompt for row in train} & {row.prompt for row in held} == set()
    check_leaks(train, held, texts=True)
    with pytest.raises(ConfigError, match="has the prompt 'p0' of"):
        check_leaks(rows, rows[:1], texts=True)
    with pytest.raises(ConfigError, match="has an image or text of"):
        check_leaks([judgment("", "a", "b")], [judgment("", "c", "b")], texts=True)
    alone = [judgment(f"p{number // 2}", f"a{number}", f"b{number}") for number in range(120)]
    assert held_out(alone, 0.2, 0, texts=True) == held_out(alone, 0.2, 0), "where content can be kept apart, it is"


def test_figures_by_hand() -> None:
    values, difference = [1.0, 0.0, 1.0, 0.5], np.array([1.0, 1.0, 0.0, -1.0])
    rows = [judgment("p", "a", "b", value=value) for value in values]
    found = figures_of_preferences(rows, difference, np.array([0.9, 0.9, 0.5, 0.1]))
    # Right, wrong, and equal scores; the tie is no judgment of either.
    assert found["accuracy"]["mean"] == pytest.approx(0.5)
    assert (found["accuracy"]["count"], found["ties"]) == (1, 1), "one prompt"
    first, last = found["calibration"]
    assert (first["count"], first["predicted"], first["observed"]) == (1, 0.5, 1.0)
    # Favored sides: preferred, not preferred, and a tie.
    assert (last["count"], last["observed"]) == (3, pytest.approx(0.5))
    assert last["predicted"] == pytest.approx(0.9)


def rows_of(folder: Path, count: int = 60) -> list[dict[str, Any]]:
    write_images(folder, 2 * count)
    return [
        {"prompt": f"p{number}", "chosen": f"{2 * number}.png", "rejected": f"{2 * number + 1}.png"}
        for number in range(count)
    ]


def rated(rows: list[dict[str, Any]], value: object) -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "image": row["chosen"], "rating": value} for row in rows]


MISTAKES: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "equal sides": (lambda rows: rows[2].update(rejected=rows[2]["chosen"]), "line 3: chosen and rejected sample"),
    "an empty path": (lambda rows: rows[2].update(chosen=" "), "line 3 has no 'chosen', the path of an image"),
    "no image": (lambda rows: rows[2].update(chosen="text.png"), "line 3: text.png cannot be read"),
    "no path": (lambda rows: rows[2].update(chosen="pairs.jsonl"), "line 3, chosen: 'pairs.jsonl' is a text, not"),
    "a bomb": (lambda rows: rows[2].update(chosen="bomb.png"), "line 3: bomb.png cannot be read"),
    "outside": (lambda rows: rows[2].update(chosen="../outside.png"), "line 3: '../outside.png'"),
    "no file": (lambda rows: rows[2].update(chosen="none.png"), "none.png' does not exist"),
    "no prompt": (lambda rows: rows[2].update(prompt=7), "line 3: the prompt is a number, not a text"),
    "no column": (lambda rows: rows[2].pop("rejected"), "line 3 has no 'rejected'"),
    "out of scale": (
        lambda rows: rows.__setitem__(slice(None), rated(rows, 7)),
        "line 1: the rating 'rating' is 7, but the scale is 1.0 to 5.0",
    ),
    "no number": (lambda rows: rows.__setitem__(slice(None), rated(rows, "good")), "is 'good', no number"),
    "both kinds": (lambda rows: rows.append(rated(rows, 3)[0]), "line 61 has no 'chosen'"),
    "ties alone": (lambda rows: [row.update(tie="yes") for row in rows], "all held-out judgments are ties or equal"),
    "equal ratings": (lambda rows: rows.__setitem__(slice(None), rated(rows, 3)), "are ties or equal ratings, which"),
    "too few": (lambda rows: rows.__delitem__(slice(30, None)), "there are 24 judgments to train on and 6 to measure"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_judgments_that_cannot_be_used_are_named(mistake: str, tmp_path: Path) -> None:
    change, message = MISTAKES[mistake]
    rows = rows_of(tmp_path)
    (tmp_path / "text.png").write_text("no image")
    if mistake == "a bomb":
        Image.fromarray(np.zeros((20_000, 20_000), bool)).save(tmp_path / "bomb.png")
    if mistake == "outside":
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path.parent / "outside.png")
    change(rows)
    with pytest.raises(ConfigError) as caught:
        fit_reward(
            fit_config(tmp_path, write_rows(tmp_path / "pairs.jsonl", rows), share=0.2 if len(rows) < 40 else 0.5)
        )
    assert message in str(caught.value)
    assert not list((tmp_path / "store").glob("reward_models/*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"prompt": "p3"}, "line 1 has the prompt 'p3' of"), ({"chosen": "7.png"}, "line 1 has an image or text of")],
    ids=["prompt", "image"],
)
def test_a_leak_into_given_held_out_judgments_is_named(change: Row, message: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 80)
    heldout = write_rows(tmp_path / "heldout.jsonl", [{**rows[40], **change}, *rows[41:]])
    data = write_rows(tmp_path / "pairs.jsonl", rows[:40])
    with pytest.raises(ConfigError, match="it would measure memory") as caught:
        fit_reward(fit_config(tmp_path, data, heldout=str(heldout)))
    assert message in str(caught.value)
    assert f"{data}, line 4" in str(caught.value)
    write_rows(heldout, rows[40:])
    made = fit_reward(fit_config(tmp_path, data, heldout=str(heldout), updates=1))
    assert (made.summary["data"]["train"], made.summary["data"]["heldout"]) == (40, 40)


def test_a_config_names_files_next_to_it_and_unknown_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "fit.yaml"
    write_pairs(tmp_path, 1)
    file.write_text("data: pairs.jsonl\nbackbone: pixels\n")
    assert load_fit(file, ["updates=3"]).data == (str(tmp_path / "pairs.jsonl"),)
    with pytest.raises(ConfigError, match=r"^--set update=3: unknown setting 'update'\. Did you mean 'updates'"):
        load_fit(file, ["update=3"])
    with pytest.raises(ConfigError, match=r"^--set share=2: 'share' is 2; it must be less than 1"):
        load_fit(file, ["seed=3", "share=2"])
    file.write_text("data: pairs.jsonl\nbackbone: pixels\nupdate: 3\n")
    with pytest.raises(ConfigError, match=rf"^{file}: unknown setting 'update'"):
        load_fit(file, ["share=0.5"])
    file.write_text("data: pairs.jsonl\nbackbone: pixels\n")
    with pytest.raises(ConfigError, match=r"backbone 'pixel' does not exist\. Did you mean 'pixels'"):
        fit_reward(load_fit(file, ["backbone=pixel"]))
    with pytest.raises(ConfigError, match="backbone 'pixels' has no option 'hight'"):
        fit_reward(load_fit(file, ["backbone={name: pixels, options: {hight: 3}}"]))


def test_a_source_that_cannot_be_read_is_named_with_its_setting_once(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    rows[2].update(prompt=7)
    listed = write_rows(tmp_path / "pairs.jsonl", rows)
    for data, message in (
        ("nope.csv", "data: 'nope.csv' does not exist"),
        (listed, f"{listed}, line 3: the prompt is a number"),
    ):
        with pytest.raises(ConfigError) as caught:
            fit_reward(fit_config(tmp_path, data))
        assert message in str(caught.value)
        assert str(caught.value).count("data: ") == (data == "nope.csv")


def test_the_command_prints_the_reward_to_use(few: Path, tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(f"data: {few}\nbackbone: {json.dumps(PIXELS)}\nupdates: 3\n")
    arguments = ["reward", "fit", str(tmp_path / "fit.yaml"), "--root", str(tmp_path / "store"), "--to"]
    first, again = (CliRunner().invoke(app, [*arguments, str(tmp_path / "mine")]) for _ in range(2))
    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    assert ", committed before: held-out accuracy" in again.output
    (printed,) = [line for line in again.output.splitlines() if line.startswith("rewards: ")]
    assert yaml.safe_load(printed) == {"rewards": [{"name": "fitted", "options": {"path": str(tmp_path / "mine")}}]}
    made = json.loads(CliRunner().invoke(app, [*arguments[:-1], "--set", "seed=1", "--json"]).output)
    assert (made["new"], made["data"]["train"], made["fit"]) == (True, 88, "fit@2")
    named = CliRunner().invoke(app, arguments[:-1]).output
    assert "fit@3, reward_models/" in named
    assert yaml.safe_load(named.splitlines()[-1]) == {"rewards": [{"name": "fitted", "options": {"run": "fit"}}]}


def test_names_of_raters_are_text_on_the_card(few: Path, tmp_path: Path) -> None:
    rows = [{**json.loads(line), "rater": "<b>|[x](y)"} for line in few.read_text().splitlines()]
    made = fit_reward(fit_config(tmp_path, write_rows(few.parent / "raters.jsonl", rows), updates=1))
    card = (made.folder / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if "22 |" in line and "b" in line and line.startswith("| &")]
    assert "<b>" not in card
    assert line.count(" | ") == 2


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("", "holds no fitted reward"),
        ("[]", "holds no fitted reward"),
        ('{"backbone": {"name": "pixels"}}', "holds no fitted reward: 'options'"),
        ('{"backbone": {"name": ["pixels"], "options": {}}}', "which does not exist"),
        ('{"backbone": {"name": "os:system", "options": {}}}', "which does not exist"),
        ('{"backbone": {"name": "pixels", "options": {"height": -1}}}', "height is -1"),
        ('{"backbone": {"name": "pixels", "options": {}}}', r"head\.safetensors' cannot be used"),
    ],
)
def test_a_folder_of_others_is_read_as_data(about: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text(about.replace("{", f'{{"heldout": {json.dumps(HELDOUT)}, ', 1))
    with pytest.raises(ConfigError, match=message):
        make_reward("fitted", {"path": str(tmp_path)})


def test_a_reward_that_may_be_chance_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    folder = write_fitted(tmp_path / "coin")
    about = json.loads((tmp_path / "coin" / "reward.json").read_text())
    for low, found in (
        (0.5, "0.560 of its held-out judgments right (95 %: 0.500 to 0.620), which"),
        (None, "(unknown interval), which"),
    ):
        about["heldout"]["accuracy"] = {"mean": 0.56, "low": low, "high": low and 0.62, "count": 99}
        (tmp_path / "coin" / "reward.json").write_text(json.dumps(about))
        with pytest.raises(ConfigError, match=re.escape(found)):
            make_reward("fitted", {"path": folder})
        assert make_reward("fitted", {"path": folder, "unproven": True})


@pytest.mark.campaign_cases("none", "characters")
@pytest.mark.slow_cases("words")
@pytest.mark.parametrize("kind", ["words", "characters", "none"])
def test_which_of_two_images_is_better_depends_on_the_prompt(kind: str, tmp_path: Path) -> None:
    left, places = write_images(tmp_path, 800), ("left side", "right side")
    rows = []
    for number in range(400):
        one, other = sorted((2 * number, 2 * number + 1), key=lambda each: -left[each])
        # One image is better for the first prompt, the other for the second.
        for place, (chosen, rejected) in zip(places, ((one, other), (other, one)), strict=True):
            prompt = f"{place} {number}"
            rows.append({"prompt": prompt, "chosen": f"{chosen}.png", "rejected": f"{rejected}.png"})
    backbone = {"name": "pixels", "options": {"height": 8, "width": 16, "prompt": kind}}
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    made = fit_reward(fit_config(tmp_path, data, backbone=backbone, updates=400, learning_rate=3e-3))
    accuracy = made.summary["heldout"]["accuracy"]["mean"]
    if kind == "none":
        assert accuracy < 0.6
        return
    assert accuracy > 0.85
    reward: Any = make_reward("fitted", {"path": str(made.folder)})
    images = pictures(tmp_path, range(100))
    scores = [np.asarray(reward.score(images, [place] * 100, []).values) for place in places]
    assert np.corrcoef(left[:100], scores[0])[0, 1] > 0.7
    assert np.corrcoef(left[:100], scores[1])[0, 1] < -0.7
    smooth = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    followed = reward.differentiable(smooth, [places[1]] * 100, [])
    np.testing.assert_allclose(followed.numpy(), scores[1], atol=1e-4)
