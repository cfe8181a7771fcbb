"""A modular index: components in folders next to it, by the classes it names; portable and plain forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowmill.models.policies.pipeline_index import (
    CLASSIC,
    MODULAR,
    component_entry,
    in_folder,
    index_file,
    placed_index,
    plain_index,
    portable_index,
    read_index_file,
)


def loaded_from(place: str | None, *made: str | None, hint: tuple[str, str] = ("diffusers", "Denoiser")) -> list[Any]:
    about = {"pretrained_model_name_or_path": place, "subfolder": "", "type_hint": list(hint), "revision": "abc"}
    return [*(made or (None, None)), about]


INDEX = {
    "_class_name": "SomeModularPipeline",
    "distilled": False,
    "transformer": loaded_from("owner/model"),
    "vae": loaded_from("/home/me/model", "diffusers", "Autoencoder"),
    "writer": loaded_from("owner/writer"),
    "reader": loaded_from("/home/me/reader"),
}
HERE = {"transformer", "vae"}


def test_components_are_those_beside_a_modular_index_by_the_classes_it_names() -> None:
    assert plain_index(INDEX, HERE.__contains__) == {
        "_class_name": "SomeModularPipeline",
        "distilled": False,
        "transformer": ["diffusers", "Denoiser"],
        "vae": ["diffusers", "Autoencoder"],
        "writer": [None, None],
        "reader": [None, None],
    }
    # Of a classic index every entry counts as it is; what is missing there is said where it is loaded.
    classic = {"vae": ["diffusers", "Autoencoder"], "safety_checker": [None, None], "tiled": False}
    assert plain_index(classic, lambda name: False) == classic


def test_what_is_written_names_no_place_of_this_machine() -> None:
    found = portable_index(INDEX, HERE.__contains__)
    assert found["transformer"] == component_entry(MODULAR, "transformer", "diffusers", "Denoiser")
    assert found["transformer"][2]["subfolder"] == "transformer"
    assert found["writer"] == INDEX["writer"]
    assert "reader" not in found
    assert "/home" not in json.dumps(found)
    classic = {"vae": ["diffusers", "Autoencoder"], "checker": ["some", "Checker"], "tiled": False}
    expected = {"vae": ["diffusers", "Autoencoder"], "checker": [None, None], "tiled": False}
    assert portable_index(classic, HERE.__contains__) == expected


def test_a_component_whose_name_is_none_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "model" / "vae").mkdir(parents=True)
    has = in_folder(tmp_path / "model")
    assert has("vae")
    assert not any(map(has, ("unet", "../model", str(tmp_path))))


def test_a_published_index_names_its_repository_where_it_names_none() -> None:
    placed = placed_index(portable_index(INDEX, HERE.__contains__), "me/mine")
    assert [placed[name][2]["pretrained_model_name_or_path"] for name in ("transformer", "vae", "writer")] == [
        *("me/mine", "me/mine", "owner/writer")
    ]
    assert placed["_class_name"] == "SomeModularPipeline"


def test_a_folder_with_both_indices_is_read_by_the_classic_one(tmp_path: Path) -> None:
    assert index_file(tmp_path) == tmp_path / CLASSIC
    (tmp_path / MODULAR).write_text(json.dumps(INDEX))
    (tmp_path / "vae").mkdir()
    assert read_index_file(index_file(tmp_path))["vae"] == ["diffusers", "Autoencoder"]
    assert read_index_file(index_file(tmp_path))["transformer"] == [None, None]
    (tmp_path / CLASSIC).write_text("{}")
    assert index_file(tmp_path) == tmp_path / CLASSIC
