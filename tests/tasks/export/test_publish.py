"""``flowmill publish`` against a Hub on this machine; nothing here leaves it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowmill.configs.errors import ConfigError, NotCommittedError, PublishError
from flowmill.flows.cli.publish import publish_command
from flowmill.flows.requests import PublishRequest
from flowmill.models.weights.lora_files import LORA_FILE
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.tasks.export.publish import HERE, finished_export, for_hub, left_over
from flowmill.tasks.runs.opening import open_run
from tests.conftest import ROOT, ConfigFactory
from tests.support.hub import Hub, local_hub
from tests.support.inside import prepare, run_stage

pytestmark = pytest.mark.slow

CARD = f"---\nlicense: mit\n---\nRuns as pasted, in this folder, and draws.\nfolder = {HERE}\n"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as served:
        yield served


@pytest.fixture
def store(make_config: ConfigFactory) -> ArtifactStore:
    """A store with a run of no epochs, whose export is the base model with fresh LoRA weights."""
    context = prepare(make_config("run.epochs=0", "model.lora={rank: 2, alpha: 8}"))
    run_stage(context, "export", 0)
    return context.store


def flowmill(store: ArtifactStore, hub: Hub | str, *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    home = str(Path(store.root.uri).parent / "hf")
    endpoint = hub if isinstance(hub, str) else hub.url
    # xet is a protocol of its own; the Hub takes the plain one from those who have it not.
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", "COLUMNS": "200", **given}
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    return subprocess.run(
        [sys.executable, "-m", "flowmill.flows.cli", "publish", *arguments, "--root", store.root.uri],
        cwd=ROOT,
        env={**kept, **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_export_is_published_in_one_commit(store: ArtifactStore, hub: Hub) -> None:
    done = flowmill(store, hub, "small", "ann/signs", "--private", "--token-env", "MINE", MINE="a-token")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{hub.url}/ann/signs"
    assert hub.private == {"ann/signs": True}
    folder = finished_export(open_run(store.root.uri, "small", reads=True), None)["README.md"].parent
    sent, names = hub.files["ann/signs"], [path.name for path in folder.iterdir() if path.is_file()]
    assert sorted(sent) == sorted(names) == ["README.md", "generation.json", "pytorch_lora_weights.safetensors"]
    assert all(sent[name] == (folder / name).read_bytes() for name in names if name != "README.md")
    assert b'\nfolder = "ann/signs"\n' in sent["README.md"]
    assert hub.commits == ["Publish a post-trained policy"]
    # Again: the repository is there, with files of its owner and of a whole model that was published before.
    own = {"sums.gguf": b"own", "runs/model_index.json": b"own"}
    hub.files["ann/signs"] = {"model_index.json": b"earlier", **own, **sent}
    again = flowmill(store, hub, "small@0", "ann/signs", HF_TOKEN="a-token")
    assert again.returncode == 0, again.stderr
    assert hub.files["ann/signs"] == {**own, **sent}
    assert again.stdout.splitlines() == ["removed model_index.json, of an earlier export.", f"{hub.url}/ann/signs"]


WHOLE_TEXTS = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
ADAPTER_TEXTS = ["README.md", "adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
WHOLE = ["model_index.json", "transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"]
SHARDS = [
    f"transformer/diffusion_pytorch_model{end}" for end in ("-00001-of-00001.safetensors", ".safetensors.index.json")
]


@pytest.mark.parametrize(
    ("held", "files", "removed"),
    [
        (ADAPTER_TEXTS, WHOLE_TEXTS, ADAPTER_TEXTS[1:3]),
        (WHOLE_TEXTS, ADAPTER_TEXTS, ["config.json", "model.safetensors"]),
        (["chat_template.jinja", *WHOLE_TEXTS], WHOLE_TEXTS, ["chat_template.jinja"]),
        (WHOLE, [*WHOLE[:2], *SHARDS], WHOLE[2:]),
        ([*WHOLE[:2], *SHARDS], WHOLE, SHARDS),
        (WHOLE, [LORA_FILE], WHOLE[:1]),
        ([LORA_FILE, f"transformer_2/{LORA_FILE}"], [LORA_FILE], [f"transformer_2/{LORA_FILE}"]),
        ([LORA_FILE], WHOLE, [LORA_FILE]),
        # Files of its owner.
        ([".gitattributes", "my.safetensors", "images/x.png", f"checkpoint-9/{LORA_FILE}"], WHOLE_TEXTS, []),
    ],
)
def test_files_of_another_export_do_not_stay(held: list[str], files: list[str], removed: list[str]) -> None:
    assert left_over(held, files) == removed


@pytest.mark.campaign_cases(
    "ann/signs-given2-the token may not write to 'ann', or the repository is",
    "ann/signs-given1-the Hub does not know this token",
)
@pytest.mark.parametrize(
    ("repo", "given", "message"),
    [
        ("ann/signs", {}, "you are not logged in to the Hugging Face Hub. Run 'hf auth login'"),
        ("ann/signs", {"HF_TOKEN": "old"}, "the Hub does not know this token"),
        ("ann/signs", {"HF_TOKEN": "b-token"}, "the token may not write to 'ann', or the repository is"),
        ("a n n", {"HF_TOKEN": "a-token"}, "is no name of a repository. Give it as owner/name."),
    ],
)
def test_refusals_say_what_to_do(
    store: ArtifactStore, hub: Hub, repo: str, given: dict[str, str], message: str
) -> None:
    hub.private["ann/signs"] = False
    done = flowmill(store, hub, "small", repo, **given)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert hub.files == {}


@pytest.mark.parametrize(
    ("model", "epoch", "message"),
    [
        ("small@1", 0, "'small@1' names epoch 1 and --epoch another, 0. Leave one of them out"),
        ("small@last", None, "'last' is no epoch. Write RUN, RUN@EPOCH, or RUN@best"),
        ("small@", None, "'' is no epoch"),
    ],
)
def test_addresses_that_are_none(model: str, epoch: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        publish_command(PublishRequest(model=model, repo="ann/signs", epoch=epoch))


@pytest.mark.campaign
def test_a_card_the_hub_refuses(store: ArtifactStore, hub: Hub) -> None:
    hub.faulty_card = True
    done = flowmill(store, hub, "small", "ann/signs", HF_TOKEN="a-token")
    assert done.returncode == 1
    assert "'ann/signs' refuses the card" in done.stderr
    assert '"license" is not one of the Hub\'s' in done.stderr
    assert hub.files == {}


@pytest.mark.campaign
def test_without_network_or_token_variable(store: ArtifactStore) -> None:
    with local_hub() as gone:
        url = gone.url
    done = flowmill(store, url, "small", "ann/signs", HF_TOKEN="a-token")
    assert done.returncode == 1
    assert f"{url} does not answer (ConnectError). Nothing was published" in done.stderr
    done = flowmill(store, url, "small", "ann/signs", "--token-env", "NOT_SET")
    assert done.returncode == 1
    assert "--token-env 'NOT_SET': there is no such environment variable" in done.stderr


def test_only_what_was_exported_is_published(store: ArtifactStore) -> None:
    with pytest.raises(NotCommittedError, match=r"no export for epoch 3: 0 of its 0 epochs are trained"):
        finished_export(open_run(store.root.uri, "small", reads=True), 3)


def test_the_card_of_a_repository_names_it() -> None:
    assert for_hub(CARD, "ann/signs").splitlines()[-1] == 'folder = "ann/signs"'


def test_what_lies_beside_an_export_is_not_published_nor_copied(store: ArtifactStore, tmp_path: Path) -> None:
    files = finished_export(open_run(store.root.uri, "small", reads=True), None)
    folder = files["README.md"].parent
    (folder / ".env").write_text("TOKEN=secret")
    (tmp_path / "outside").write_text("private")
    (folder / "notes.txt").symlink_to(tmp_path / "outside")
    assert finished_export(open_run(store.root.uri, "small", reads=True), None) == files
    target = ArtifactStore(str(tmp_path / "copy"))
    copy_run(ArtifactStore(store.root.uri), target, "small", progress=lambda *about: None)
    copied = {path.name for path in Path(target.root.uri).rglob("*")}
    assert "README.md" in copied
    assert not copied & {".env", "notes.txt"}
    kept = folder.parent / "kept"
    (folder / "README.md").rename(kept)
    (folder / "README.md").symlink_to(kept)
    with pytest.raises(PublishError, match="is a link"):
        finished_export(open_run(store.root.uri, "small", reads=True), None)


def test_samples_are_published_by_datasets_itself() -> None:
    with pytest.raises(ConfigError, match=r"--dataset no longer exists\. .*\.dataset\(EPOCH\)\.push_to_hub"):
        publish_command(PublishRequest(model="small", repo="ann/signs"), dataset=True)
