"""Files loaded of a hub repository: those that diffusers loads, no pickle, one commit for all of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline
from diffusers.pipelines import pipeline_utils
from huggingface_hub.utils import filter_repo_objects

from flowmill.configs.errors import ConfigError
from flowmill.models.policies.pipeline_index import CLASSIC as INDEX
from flowmill.tasks.inputs.hub import download, pipeline_files, transformers_files
from flowmill.tasks.runs.context import RunContext
from tests.support.hub import local_hub
from tests.support.inside import prepare, run_epoch, run_stage, session_of
from tests.support.language_models import texts_config

SD3 = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.30.0",
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    **{f"text_encoder{n}": ["transformers", "CLIPTextModelWithProjection"] for n in ("", "_2")},
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    **{f"tokenizer{n}": ["transformers", "CLIPTokenizer"] for n in ("", "_2")},
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SD3_FILES = [
    *(".gitattributes", "LICENSE.md", "README.md", INDEX, "sd3_medium.safetensors", "demo.png"),
    *(f"text_encoder{n}/{name}" for n in ("", "_2") for name in ("config.json", "model.safetensors")),
    *(f"text_encoder{n}/model.fp16.safetensors" for n in ("", "_2")),
    *(f"text_encoder_3/model-0000{n}-of-00002.safetensors" for n in (1, 2)),
    *(f"text_encoder_3/model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2)),
    *("text_encoder_3/config.json", "text_encoder_3/model.safetensors.index.json"),
    "text_encoder_3/model.safetensors.index.fp16.json",
    *(f"tokenizer{n}/{name}" for n in ("", "_2") for name in ("merges.txt", "vocab.json", "tokenizer_config.json")),
    *("tokenizer_3/spiece.model", "tokenizer_3/tokenizer.json", "tokenizer_3/chat_template.jinja"),
    *("scheduler/scheduler_config.json", "transformer/config.json", "vae/config.json"),
    *("transformer/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
    "text_encoders/t5xxl_fp8_e4m3fn.safetensors",
]
#: What both formats of some older repositories look like.
WITH_PICKLES = [
    *SD3_FILES,
    *("text_encoder/pytorch_model.bin", "vae/diffusion_pytorch_model.bin", "vae/diffusion_pytorch_model.fp16.bin"),
    *("text_encoder/model.onnx", "text_encoder/flax_model.msgpack"),
]


def loaded_by_diffusers(names: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return what ``DiffusionPipeline.download`` asks the hub for."""
    asked: dict[str, Any] = {}
    (folder / INDEX).write_text(json.dumps(SD3))

    def snapshot(*_: Any, **options: Any) -> str:
        asked.update(options)
        return str(folder)

    siblings = [SimpleNamespace(rfilename=name) for name in names]
    info = SimpleNamespace(siblings=siblings, sha="0" * 40)
    monkeypatch.setattr(pipeline_utils, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(pipeline_utils, "hf_hub_download", lambda *_, **__: str(folder / INDEX))
    monkeypatch.setattr(pipeline_utils, "snapshot_download", snapshot)
    DiffusionPipeline.download("owner/sd3", use_safetensors=True, force_download=True)
    patterns = {"allow_patterns": asked["allow_patterns"], "ignore_patterns": asked["ignore_patterns"]}
    return set(filter_repo_objects(names, **patterns))


@pytest.mark.parametrize("names", [SD3_FILES, WITH_PICKLES], ids=["safetensors", "with pickles"])
def test_the_files_are_those_diffusers_loads(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = set(pipeline_files(names, SD3, where="model.path 'owner/sd3'"))
    theirs = loaded_by_diffusers(names, tmp_path, monkeypatch)
    assert theirs - ours <= {"text_encoder_3/model.safetensors.index.fp16.json"}
    assert ours - theirs == {"LICENSE.md", "README.md"}, "for the card of an export"
    assert "tokenizer_3/chat_template.jinja" in ours
    assert not [name for name in ours if name.endswith((".bin", ".onnx", ".msgpack"))]


def test_weights_that_are_pickles_alone_are_refused() -> None:
    names = [name for name in WITH_PICKLES if not (name.startswith("vae/") and name.endswith(".safetensors"))]
    with pytest.raises(ConfigError, match=r"'vae' has weights as diffusion_pytorch_model\.bin only, which is not"):
        pipeline_files(names, SD3, where="model.path 'owner/sd3'")


def test_a_variant_without_plain_weights_is_loaded() -> None:
    names = [name for name in SD3_FILES if name != "text_encoder/model.safetensors"]
    assert "text_encoder/model.fp16.safetensors" in pipeline_files(names, SD3, where="here")


def test_weights_that_a_single_file_holds_are_not_loaded() -> None:
    held = frozenset({"transformer", "text_encoder_3"})
    left = set(pipeline_files(SD3_FILES, SD3, where="here")) - set(
        pipeline_files(SD3_FILES, SD3, where="here", without=held)
    )
    assert {name.partition("/")[0] for name in left} == held
    assert all(".safetensors" in name for name in left)


def test_a_branch_is_resolved_to_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / INDEX).write_text(json.dumps(SD3))
    info = SimpleNamespace(sha="a" * 40, siblings=[SimpleNamespace(rfilename=name) for name in SD3_FILES])
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, repo, revision: info)

    def file(repo: str, name: str, *, revision: str) -> str:
        asked.append((name, revision))
        return str(tmp_path / name)

    def snapshot(repo: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append(("*", revision))
        assert "vae/config.json" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", file)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert download("owner/sd3", "main") == tmp_path
    assert asked == [(INDEX, "a" * 40), ("*", "a" * 40)]


def test_a_repository_that_cannot_be_reached_is_taken_from_the_cache_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: Any, repo: str, revision: str | None) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, revision, local_files_only: "/cached/here")
    assert download("owner/sd3", None) == Path("/cached/here")

    def absent(repo: str, revision: str | None, local_files_only: bool) -> str:
        raise FileNotFoundError("nothing cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(ConfigError, match="'owner/sd3' cannot be downloaded: ConnectionError: no network"):
        download("owner/sd3", None)


#: A language model with what repositories have next to it.
LANGUAGE_MODEL = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "preprocessor_config.json", "README.md", "LICENSE"),
    *("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
]
NEXT_TO_IT = [
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "modeling_own.py", "demo.png"),
    *("original/params.json", "original/consolidated.00.pth", "onnx/model.onnx", "model.fp16.safetensors"),
]


def test_the_files_of_a_model_of_transformers_are_those_it_loads() -> None:
    files = transformers_files([*LANGUAGE_MODEL, *NEXT_TO_IT], where="here")
    assert sorted(files) == sorted(LANGUAGE_MODEL)
    with pytest.raises(ConfigError, match=r"there is no model\.safetensors, but pytorch_model\.bin\. Pickled weights"):
        transformers_files(["config.json", "pytorch_model.bin"], where="here")
    with pytest.raises(ConfigError, match="nor other weights"):
        transformers_files(["config.json", "consolidated.safetensors"], where="here")


def test_a_language_model_of_the_hub_trains_as_its_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*settings: str) -> RunContext:
        context = prepare(texts_config(tmp_path, *settings))
        run_epoch(context, 1)
        return context

    local = trained("run.name=local")
    with local_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{_TEMPLATE}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.private["owner/lm"] = False
        hub.files["owner/lm"] = {path.name: path.read_bytes() for path in (tmp_path / "lm").iterdir()}
        hub.files["owner/lm"] |= {"pytorch_model.bin": b"", "original/params.json": b"{}"}
        of_hub = trained("run.name=hub", "model.path=owner/lm")
        run_stage(of_hub, "export", 1)
    (card,) = (tmp_path / "store" / "exports").glob("*/*/pipeline/README.md")
    assert yaml.safe_load(card.read_text().split("---")[1])["base_model"] == "owner/lm"
    assert of_hub.model_identity == {"hub": "owner/lm", "commit": "0" * 40}
    one, other = (session_of(run).host.trainable(run.policy_ref(1)).state() for run in (local, of_hub))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


_TEMPLATE = "{repo_id}/resolve/{revision}/{filename}"
