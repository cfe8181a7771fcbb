"""A language model whose texts a frozen image model draws: stages, rewards of images, and who learns."""

from __future__ import annotations

from pathlib import Path

import yaml

from configs.load import load_config
from configs.schema import RunConfig
from storage.tables import read_rows
from tasks.identities.nodes import RENDERER, Node, run_nodes
from tasks.preflight.check import check_config
from tasks.review.reading import artifact_table, media_of
from tests.support.inside import evaluate, prepare, run_epoch
from tests.support.language_models import texts_data


def config_of(folder: Path, base: Path, *overrides: str) -> RunConfig:
    path = folder / "texts.yaml"
    if not path.exists():
        data = texts_data(folder)
        data["render"] = {
            "model": {
                "policy": "sd3",
                "path": str(base),
                "height": 16,
                "width": 32,
                "options": {"max_sequence_length": 1, "schedule": "linear"},
            },
            "steps": 2,
        }
        data["rewards"] = [{"name": "jpeg_compressibility"}]
        data["monitors"] = [{"name": "tests.support.language_models:digits_in", "reads": "texts"}]
        path.write_text(yaml.safe_dump(data))
    return load_config(path, overrides)


def test_images_are_drawn_of_texts_and_scored_for_the_prompt(tiny_base: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_base)
    check_config(config)
    nodes = list(run_nodes(config))
    assert nodes[:2] == [Node(0, "base"), Node(0, "base", RENDERER)]
    assert [node.stage for node in nodes if node.epoch == 1][:6] == [
        "rollout",
        "render",
        "score",
        "score",
        "advantage",
        "optimize",
    ]
    context = prepare(config)
    evaluate(context, 0)
    run_epoch(context, 1)
    texts = artifact_table(context.store, context.chain.require(1, "rollout").ref)
    images = artifact_table(context.store, context.chain.require(1, "render").ref)
    for column in ("sample_id", "prompt", "metadata", "group_id", "replica"):
        assert images.column(column) == texts.column(column), column
    assert images.column("text").to_pylist() == [text.strip() for text in texts.column("text").to_pylist()]
    media = media_of(context.store, context.chain.require(1, "render").ref)
    assert {each.shape for each in media.values()} == {(16, 32, 3)}
    scores = read_rows(context.store, context.chain.require(1, "score", "jpeg_compressibility").ref)
    assert scores.column("sample_id") == texts.column("sample_id")
