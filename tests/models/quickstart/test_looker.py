"""The tiny model that looks at its image is pre-trained on rows as a run makes them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowmill.configs.load import load_config
from flowmill.models.quickstart import looker, vision
from flowmill.models.quickstart.looker import LookerBuilder, _Looks
from flowmill.models.quickstart.vision import PACE, image_processor
from flowmill.tasks.modalities.tokens.run_prompts import Comments, prompts_in
from flowmill.tasks.specs.plan import RunPlan


@pytest.mark.slow
def test_a_conversation_is_a_row_of_pre_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looker, "PACE", replace(PACE, every=1))
    for module in (looker, vision):
        monkeypatch.setattr(module, "IMAGES", 300)
    LookerBuilder(accuracy=0.0).build(tmp_path, lambda *_: None)
    config = load_config("tiny_agent_sees", [f"model.path={tmp_path}", "model.build=null"])
    assert config.render is not None
    assert config.render.turns is not None
    prompts = prompts_in(tmp_path, RunPlan(config))
    assert prompts.pictures is not None
    image = prompts.pictures.number("image", lambda: np.full((16, 32, 3), 255, np.uint8))
    corpus = _Looks(image_processor(), 0)
    asked = corpus.requested(random.Random(0), 7)
    _, before, answer = corpus.looked(7, asked, accepts=True)
    first = prompts.tokenizer(f'("{asked}")<eos>', add_special_tokens=False).input_ids
    goes_on = Comments(prompts, config.render.turns).after(first, "", [image])
    assert prompts.stored([*prompts.ids(f'"{asked}"'), *first, *goes_on]) == before
    said = prompts.tokenizer.decode(answer)
    assert (
        said
        == "".join(
            f"{each}{'+' if each == wanted else '-'}" for each, wanted in zip(corpus.texts[7], asked, strict=True)
        )
        + ".<eos>"
    )
    assert config.render.turns.ends(said)
    assert config.render.drawn(said) == ""
    assert config.render.drawn(f'("{asked}")') == f'"{asked}"'
