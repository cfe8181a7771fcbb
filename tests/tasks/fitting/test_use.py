"""Fitted rewards in runs: scores, gradients, preferences about stored samples, and what a refit makes stale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flowmill.configs.errors import ConfigError, CorruptError, RewardError, RunConflictError
from flowmill.configs.schema import RunConfig
from flowmill.flows import process_state
from flowmill.models.rewards.backbones import TextLikelihood
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import Handling, score
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.maintenance.verify import verify_store
from flowmill.storage.trajectories.tables import read_rows, write_rows
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.checks.names import check_names
from flowmill.tasks.checks.try_rewards import try_rewards
from flowmill.tasks.execution.jobs import JobSession, JobSpec, run_of_job
from flowmill.tasks.fitting import fit
from flowmill.tasks.fitting.fit import FittedModel, copy_model, fit_reward
from flowmill.tasks.inputs.fits import Fits, named_fits
from flowmill.tasks.metrics.samples import shards_of
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import begin_run, open_run
from flowmill.tasks.runs.progress import Silent
from flowmill.tasks.runs.staleness import explain
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.plan import RunPlan
from flowmill.tasks.stages.stage import Shard
from flowmill.tasks.stages.stage_run import StageRun
from tests.models.text.test_control_tokens import tokenizer
from tests.support.clip import write_clip, write_siglip
from tests.support.inside import Make, prepare, run_epoch, stage_rows, stage_run
from tests.support.judged import fit_config, write_pairs
from tests.support.language_models import write_language_model
from tests.support.text_models import write_sentiment

ROLLOUT, SCORE = Node(1, "rollout", ""), Node(1, "score", "fitted")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), 110)


def refit(pairs: Path, folder: Path, updates: int) -> FittedModel:
    made = fit_reward(fit_config(folder, pairs, name="taste", updates=updates))
    copy_model(made, folder / "mine")
    return made


def make(context: RunContext, node: Node) -> ArtifactRef:
    run = stage_run(context, node.stage, node.epoch, node.slot)
    run.execute()
    return run.ref


def column(context: RunContext, ref: ArtifactRef) -> list[float]:
    return read_rows(context.store, ref).column("reward").to_pylist()  # type: ignore[no-any-return]


def pending(context: RunContext, node: Node) -> int:
    return len(stage_run(context, node.stage, node.epoch, node.slot).pending())


@pytest.mark.campaign_cases("path")
@pytest.mark.parametrize("named", ["run", "path"])
def test_a_refit_makes_scores_stale_and_rollouts_are_scored_again(
    named: str, pairs: Path, make_config: Make, tmp_path: Path
) -> None:
    assert refit(pairs, tmp_path, 5).named == "taste@1"
    place = "run: taste" if named == "run" else f"path: '{tmp_path / 'mine'}'"
    options = f"rewards=[{{name: fitted, options: {{{place}, unproven: true}}}}]"
    config = make_config(options, f"store.root={tmp_path / 'store'}")
    context = prepare(config)
    rolled, first = make(context, ROLLOUT), make(context, SCORE)
    scores = np.array(read_rows(context.store, first).column("reward").to_pylist())
    assert np.isfinite(scores).all()
    assert scores.std() > 0
    assert refit(pairs, tmp_path, 6).named == "taste@2"
    other = begin_run(config)
    assert (pending(other, ROLLOUT), pending(other, SCORE)) == (0, 2)
    assert "has other contents" in explain(other.chain, SCORE)[-1]
    second = make(other, SCORE)
    assert second != first
    assert other.chain.require(*ROLLOUT).ref == rolled
    assert np.array(read_rows(other.store, second).column("reward").to_pylist()).tolist() != scores.tolist()
    refit(pairs, tmp_path, 5)
    assert pending(begin_run(config), SCORE) == 0, "the first model's scores are found again"


def send(run: StageRun, shard: Shard, worker: JobSession) -> None:
    """Have a worker make a shard."""
    job = JobSpec.parse(JobSpec.of(run).encoded())
    run_of_job(job, worker.of(job)).run_shard(shard)


@pytest.mark.parametrize("named", ["run", "path"])
def test_workers_score_with_the_fit_after_which_scores_are_named(
    named: str, pairs: Path, make_config: Make, tmp_path: Path
) -> None:
    def config_with(place: str, *overrides: str) -> RunConfig:
        rewards = f"rewards=[{{name: fitted, options: {{{place}, unproven: true}}}}]"
        return make_config(rewards, f"store.root={tmp_path / 'store'}", *overrides)

    refit(pairs, tmp_path, 5)
    config = config_with("run: taste" if named == "run" else f"path: '{tmp_path / 'mine'}'")
    context, lasting = prepare(config), JobSession(Silent)
    make(context, ROLLOUT)
    run = stage_run(context, "score", 1, "fitted")
    one, other = run.pending()
    send(run, one, lasting)
    refit(pairs, tmp_path, 6)
    # Only a name can be looked up again; of a replaced folder nothing is left.
    send(run, other, JobSession(Silent) if named == "run" else lasting)
    run.finish()
    again = stage_run(begin_run(config), "score", 1, "fitted")
    for shard in again.pending():
        send(again, shard, lasting)
    again.finish()

    truths = []
    for number in (1, 2):
        plain = prepare(config_with(f"run: taste@{number}", f"run.name=with{number}"))
        make(plain, ROLLOUT)
        truths.append(column(plain, make(plain, SCORE)))
    assert [column(context, each.ref) for each in (run, again)] == truths


def test_jobs_of_one_run_share_a_session_until_fits_are_others(pairs: Path, make_config: Make, tmp_path: Path) -> None:
    plain = JobSpec.of(stage_run(prepare(make_config("run.name=plain")), "rollout", 1))
    assert (plain.identities["fits"], plain.identities["files"]) == ({}, {})
    made = refit(pairs, tmp_path, 5)
    rewards = "rewards=[{name: fitted, options: {run: taste, unproven: true}}]"
    config, worker = make_config(rewards, f"store.root={tmp_path / 'store'}"), JobSession(Silent)
    context = prepare(config)
    job = JobSpec.of(stage_run(context, "rollout", 1))
    assert job.identities["fits"] == {"taste": str(made.ref)}
    session, root = worker.of(job), context.store.root.uri
    side = open_run(root, "small", overrides=["rollout.steps=2"], epoch=1, trusted=True)
    job_of_side = JobSpec.of(stage_run(side, "rollout", 1))
    refit(pairs, tmp_path, 6)
    own = JobSession(Silent).of(job_of_side).context.chain.own
    assert own is not None
    assert own.ref(SCORE) == context.chain.ref(SCORE), "of the run's own config, too"
    assert session.context.contents.fits.artifact("taste") == made.ref
    # A worker sends jobs to its own processes, with what it was sent.
    assert worker.of(JobSpec.of(stage_run(session.context, "encode", 0))) is session
    newer = JobSpec.of(stage_run(begin_run(config), "rollout", 1))
    assert worker.of(newer) is not session
    with process_state.opened(context) as opened:
        assert process_state.begin(config) is context, "a run at work keeps its fits"
        with process_state.session_of(job) as own, process_state.session_of(newer) as other:
            assert (own is opened, other is opened) == (True, False)


def test_a_copied_run_is_scored_with_the_fits_that_it_names(pairs: Path, make_config: Make, tmp_path: Path) -> None:
    refit(pairs, tmp_path, 5)
    rewards = "rewards=[{name: fitted, options: {run: taste@1, unproven: true}}]"
    config = make_config(rewards, f"store.root={tmp_path / 'store'}")
    context = prepare(config)
    make(context, ROLLOUT)
    assert named_fits(config) == ["taste"]
    target, taken = (str(tmp_path / name) for name in ("copy", "taken"))
    copy_run(context.store, ArtifactStore(target), "small", fits=named_fits(config), progress=lambda *_: None)
    copied = begin_run(make_config(rewards, f"store.root={target}"))
    assert pending(copied, ROLLOUT) == 0
    scored = make(copied, SCORE)
    assert scored == make(context, SCORE)
    fit_reward(fit_config(tmp_path, pairs, name="taste", updates=6, store={"root": taken}))
    with pytest.raises(RunConflictError, match="has another fit 'taste@1'"):
        copy_run(context.store, ArtifactStore(taken), "small", fits=["taste"], progress=lambda *_: None)


def test_fits_that_rewards_cannot_name(
    pairs: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(**options: str) -> str:
        rewards = json.dumps([{"name": "fitted", "options": {**options, "unproven": True}}])
        config = make_config(f"rewards={rewards}", f"store.root={tmp_path / 'store'}")
        with pytest.raises(ConfigError) as error:
            try_rewards(RunPlan(config))
        return str(error.value)

    assert "there is no fit 'taste'" in refusal(run="taste")
    assert "the store does not exist yet" in refusal(run="taste")
    assert "names no fit. Set the option 'run'" in refusal()
    with monkeypatch.context() as broken:
        broken.setattr(fit, "_write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            refit(pairs, tmp_path, 5)
    assert "the fit 'taste' in" in (found := refusal(run="taste"))
    assert "has not finished" in found
    assert verify_store(ArtifactStore(str(tmp_path / "store")), deep=True)["problems"] == []
    made = refit(pairs, tmp_path, 5)
    assert made.named == "taste@1"
    newest = refit(pairs, tmp_path, 6)
    shutil.rmtree(tmp_path / "store" / str(newest.ref))
    for named in ("taste", "taste@2"):
        assert f"the fit 'taste@2' in '{tmp_path / 'store'}' is lost: its artifact {newest.ref}" in refusal(run=named)
    assert Fits(ArtifactStore(str(tmp_path / "store"))).artifact("taste@1") == made.ref
    assert refit(pairs, tmp_path, 6).ref == Fits(ArtifactStore(str(tmp_path / "store"))).artifact("taste")
    assert "did you mean 'taste'" in refusal(run="tast").lower()
    assert "there are taste@1, taste@2." in refusal(run="taste@3")
    assert "'../taste' names no fit" in refusal(run="../taste")
    assert "(run) and the folder" in refusal(run="taste", path=str(made.folder))
    with pytest.raises(ConfigError, match="which only a run finds, in its store"):
        make_reward("fitted", {"run": "taste"})
    rewards = "rewards=[{name: fitted, options: {run: taste@1}, server: 'http://127.0.0.1:8600'}]"
    with pytest.raises(ConfigError, match="which its server does not read"):
        check_config(make_config(rewards, f"store.root={tmp_path / 'store'}"), rewards=False)
    (tmp_path / "store" / "fits" / "bad").mkdir()
    (tmp_path / "store" / "fits" / "bad" / "0001.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"fits/bad/0001\.json names no fit"):
        Fits(ArtifactStore(str(tmp_path / "store"))).artifact("bad")
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.run: there is no fit 'other'"):
        check_names(make_config("rewards=[{name: fitted, options: {run: other}}]", f"store.root={tmp_path / 'store'}"))


def test_a_policy_is_trained_on_its_gradients(pairs: Path, make_config: Make, tmp_path: Path) -> None:
    refit(pairs, tmp_path, 30)
    context = prepare(
        make_config(
            f"rewards=[{{name: fitted, options: {{path: '{tmp_path / 'mine'}'}}}}]",
            "optimize.algorithm=reward_gradient",
            "rollout.plan={name: final}",
        )
    )
    run_epoch(context, 1)
    table = stage_rows(context, 1, "gradient", "fitted")
    assert min(table.column("rms").to_pylist()) > 0
    values = dict(zip(table.column("sample_id").to_pylist(), table.column("value").to_pylist(), strict=True))
    scored = stage_rows(context, *SCORE)
    scores = dict(zip(scored.column("sample_id").to_pylist(), scored.column("reward").to_pylist(), strict=True))
    # Scores are of images that are clipped and rounded to 8 bits.
    assert np.corrcoef(list(scores.values()), [values[sample] for sample in scores])[0, 1] > 0.98


def test_its_gradient_is_that_of_finite_differences(pairs: Path, tmp_path: Path) -> None:
    reward = make_reward("fitted", {"path": str(refit(pairs, tmp_path, 20).folder)})
    image = torch.rand(1, 3, 16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = reward.differentiable(image, ["a"], [{}])  # type: ignore[attr-defined]
    value.sum().backward()
    assert image.grad is not None
    step = 1e-2 * image.grad / image.grad.norm()
    with torch.no_grad():
        up, down = (reward.differentiable(image + each, ["a"], [{}]).item() for each in (step, -step))  # type: ignore[attr-defined]
    assert (up - down) / 2e-2 == pytest.approx(image.grad.norm().item(), rel=0.02)


def write_preferences(store: ArtifactStore, samples: ArtifactRef, count: int) -> ArtifactRef:
    """Commit preferences about samples, whichever of two is darker, as ``flowmill rate`` does."""
    media = {}
    for shard in shards_of(store, samples):
        names = shard.table.column("sample_id").to_pylist()
        media |= {name: (shard.media(row).mean(), shard.table["prompt"][row].as_py()) for row, name in enumerate(names)}
    names, draw, rows = sorted(media), np.random.default_rng(0), []
    for number in range(count):
        prompt = media[names[number % len(names)]][1]
        first, second = draw.permutation([name for name in names if media[name][1] == prompt])[:2]
        rows.append((prompt, first, second, float(media[first][0] > media[second][0]), "ada", number))
    columns = {
        "prompt_id": [row[0] for row in rows],
        "prompt": [row[0] for row in rows],
        "first_artifact": [str(samples)] * count,
        "first_sample": [row[1] for row in rows],
        "second_artifact": [str(samples)] * count,
        "second_sample": [row[2] for row in rows],
        "preferred": [row[3] for row in rows],
        "rater": [row[4] for row in rows],
        "number": [row[5] for row in rows],
        "seconds": [1.0] * count,
    }
    ref = ArtifactRef("preferences", "0" * 32)
    with store.root.staging() as folder:
        write_rows("preferences", folder, columns)
        store.commit(ref, "judgments", folder, rows=count)
    store.seal(ref, shards=["judgments"], summary={}, stage="rate", stage_version=1, options={}, inputs=(str(samples),))
    return ref


@pytest.mark.parametrize("judged", ["latents", "images"])
def test_preferences_of_a_store_are_about_its_samples(judged: str, make_config: Make, tmp_path: Path) -> None:
    # Eight prompts of four samples each: some prompts are held out whole.
    config = make_config("rollout.prompts_per_epoch=8", "rollout.media.latents=true", "rewards=[jpeg_compressibility]")
    context = prepare(config)
    samples = make(context, ROLLOUT)
    ref = write_preferences(context.store, samples, 160)
    backbone = "latents" if judged == "latents" else {"name": "pixels", "options": {"height": 16, "width": 32}}
    config_of = fit_config(
        tmp_path, ref, backbone=backbone, share=0.3, updates=100, store={"root": context.store.root.uri}
    )
    made = fit_reward(config_of)
    assert set(context.store.require(made.ref).inputs) == {str(ref), str(samples)}
    assert made.summary["data"]["sources"] == {str(ref): 160}
    if judged == "images":
        return
    assert made.summary["curve"][-1]["train"] < 0.3
    again = prepare(
        make_config(
            "rollout.prompts_per_epoch=8",
            "rollout.media.latents=true",
            f"rewards=[{{name: fitted, options: {{path: '{made.folder}', media: latents, unproven: true}}}}]",
        ).model_copy(update={"run": config.run.model_copy(update={"name": "other"})})
    )
    assert pending(again, ROLLOUT) == 0, "the samples of the first run are those of the second"
    make(again, ROLLOUT)
    scores = read_rows(again.store, make(again, SCORE)).column("reward").to_pylist()
    assert np.std(scores) > 0
    with pytest.raises(ConfigError, match=r"was fitted on latents.*Set it to 'latents'"):
        make_reward("fitted", {"path": str(made.folder), "unproven": True})


def test_a_preference_about_an_unknown_sample_is_named(make_config: Make, tmp_path: Path) -> None:
    context = prepare(make_config())
    samples = make(context, ROLLOUT)
    ref = write_preferences(context.store, samples, 4)
    record = context.store.shards(ref)[0]
    table = read_rows(context.store, ref).to_pydict()
    other = ArtifactRef("preferences", "1" * 32)
    with context.store.root.staging() as folder:
        write_rows("preferences", folder, {**table, "first_sample": ["x", *table["first_sample"][1:]]})
        context.store.commit(other, record.shard, folder, rows=4)
    origin = {"stage": "rate", "stage_version": 1, "options": {}, "inputs": ()}
    context.store.seal(other, shards=[record.shard], summary={}, **origin)
    with pytest.raises(ConfigError, match=rf"{other}, row 1: {samples} has no sample 'x'"):
        fit_reward(fit_config(tmp_path, other, store={"root": context.store.root.uri}))
    backbone = {"name": "text", "options": {"model": write_sentiment(tmp_path / "model")}}
    with pytest.raises(ConfigError, match="is none of texts"):
        fit_reward(fit_config(tmp_path, ref, backbone=backbone, store={"root": context.store.root.uri}))


@pytest.mark.parametrize("write", [write_clip, write_siglip])
def test_a_head_on_embeddings_needs_their_model(write: Callable[[Path], str], tmp_path: Path) -> None:
    pairs, clip = write_pairs(tmp_path / "pairs", 110), write(tmp_path / "clip")
    backbone = {"name": "clip", "options": {"model": clip, "hidden": 8}}
    made = fit_reward(fit_config(tmp_path, pairs, backbone=backbone, updates=200, learning_rate=1e-2))
    assert made.summary["curve"][-1]["train"] < 0.5
    with pytest.raises(ConfigError, match=r"does not hold the model of its backbone\. Set the option 'model'"):
        make_reward("fitted", {"path": str(made.folder), "unproven": True})
    reward = make_reward("fitted", {"path": str(made.folder), "model": clip, "unproven": True})
    images = np.random.default_rng(0).integers(0, 256, (3, 30, 30, 3), np.uint8)
    found = score(reward, "fitted", Batch(media=images, prompts=["a", "b", "c"], metadata=[{}] * 3), Handling()).values
    smooth = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    followed = reward.differentiable(smooth.requires_grad_(), ["a", "b", "c"], [{}] * 3)  # type: ignore[attr-defined]
    np.testing.assert_allclose(followed.detach().numpy(), found, atol=1e-4)
    write(tmp_path / "other")
    (tmp_path / "other" / "notes.txt").write_text("another model")
    backbone = {"name": "clip", "options": {"model": str(tmp_path / "other"), "hidden": 8}}
    assert fit_reward(fit_config(tmp_path, pairs, backbone=backbone, updates=1)).ref != made.ref


def test_a_head_on_a_classifier_of_texts(tmp_path: Path) -> None:
    words, draw = [*["a", "sign", "that", "says", "sad", "happy", "days", "are", "here"]], np.random.default_rng(0)
    data, model = tmp_path / "texts.csv", write_sentiment(tmp_path / "model")
    lines = ["prompt,chosen,rejected,tie"]
    for number in range(150):
        first, second = (" ".join([mark, *draw.choice(words, 4)]) for mark in ("good", "bad"))
        lines.append(f"p{number},{first} {number},{second} {number},{'true' if number % 10 == 0 else 'false'}")
    data.write_text("\n".join(lines))
    backbone = {"name": "text", "options": {"model": model, "given": "text"}}
    made = fit_reward(fit_config(tmp_path, data, backbone=backbone, updates=300, learning_rate=1e-2))
    assert made.summary["heldout"]["accuracy"]["mean"] > 0.9
    assert made.summary["heldout"]["ties"] > 0
    reward = make_reward("fitted", {"path": str(made.folder), "model": model})
    texts = np.array(["good days are here", "bad days are here"], object)
    good, bad = np.asarray(reward.score(texts, ["", ""], [{}, {}]).values)  # type: ignore[union-attr]
    assert good > bad
    backbone["options"].pop("given")
    paired = fit_reward(fit_config(tmp_path, data, backbone=backbone, updates=20))
    reward = make_reward("fitted", {"path": str(paired.folder), "model": model, "unproven": True})
    one, other = np.asarray(reward.score(texts[[0, 0]], ["a sign", "sad"], [{}, {}]).values)  # type: ignore[union-attr]
    assert one != other, "by default the model is given prompt and text"
    with pytest.raises(RewardError, match="it was fitted on texts, and is given images"):
        score(reward, "fitted", Batch(media=np.zeros((1, 8, 8, 3), np.uint8), prompts=[""], metadata=[{}]), Handling())


def test_likelihoods_under_a_language_model_are_those_of_its_own_loss(tmp_path: Path) -> None:
    write_language_model(tmp_path / "lm")
    sums, texts = ["1+2=", "12+34=", "9+9="], ["3", "46", ""]
    backbone = TextLikelihood(model=str(tmp_path / "lm"), device="cpu")
    found = backbone.inputs(np.array(texts, object), sums)
    model, tokenizer = (loader.from_pretrained(tmp_path / "lm") for loader in (AutoModelForCausalLM, AutoTokenizer))
    for row, text, prompt in zip(found.tolist(), texts, sums, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids[0].tolist()
        after = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        whole = torch.tensor([[*ids, *after]])
        logs = model(input_ids=whole).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        each = logs.gather(1, torch.tensor(after)[:, None])[:, 0]
        assert row == pytest.approx([each.sum().item(), each.mean().item(), each.min().item()], abs=1e-5)
    with pytest.raises(ValueError, match=r"a prompt and its text have 82 tokens, but .* takes 64"):
        backbone.inputs(["7" * 80], [""])


def test_likelihoods_are_of_the_text_as_it_follows_its_prompt(tmp_path: Path) -> None:
    """SentencePiece begins a text with a space, and some tokenizers end every text."""
    made = tokenizer("spaced", ends=True)
    made.save_pretrained(tmp_path)
    config = LlamaConfig(vocab_size=len(made), hidden_size=16, intermediate_size=16, num_attention_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    (found,) = TextLikelihood(model=str(tmp_path), device="cpu").inputs(np.array(["46"], object), ["12+34="])
    ids = made("12+34=46", return_tensors="pt").input_ids
    with torch.no_grad():
        logs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-3:, 0]
    assert found.tolist() == pytest.approx([logs.sum().item(), logs.mean().item(), logs.min().item()], abs=1e-5)


def test_a_head_on_likelihoods_learns_what_the_language_model_knows(tmp_path: Path) -> None:
    write_language_model(tmp_path / "lm")
    options, draw = {"model": str(tmp_path / "lm")}, np.random.default_rng(0)
    pairs = [["".join(map(str, draw.integers(0, 10, 3))) for _ in range(2)] for _ in range(120)]
    likely = TextLikelihood(**options, device="cpu").inputs([text for pair in pairs for text in pair], ["1="] * 240)
    rows = ["prompt,chosen,rejected"]
    for pair, (first, second) in zip(pairs, likely[:, 0].view(-1, 2).tolist(), strict=True):
        rows.append(",".join([f"{len(rows)}=", *sorted(pair, reverse=first < second, key=pair.index)]))
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    config = fit_config(tmp_path, tmp_path / "texts.csv", backbone={"name": "likelihood", "options": options})
    made = fit_reward(config.model_copy(update={"learning_rate": 0.1}))
    assert made.summary["heldout"]["accuracy"]["low"] > 0.5
    reward = make_reward("fitted", {"path": str(made.folder), **options})
    scores = np.asarray(reward.score(np.array(pairs[0], object), ["1="] * 2, [{}, {}]).values)  # type: ignore[union-attr]
    assert (scores[0] > scores[1]) == (likely[0, 0] > likely[1, 0]).item()
