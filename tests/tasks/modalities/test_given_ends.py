"""Given texts after their prompts: tokens as in the whole text, and the end token that the model ends texts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.errors import ConfigError, DataError
from flowmill.configs.load import parse_config
from flowmill.configs.tokens import TokensSection
from flowmill.models.policies.language_model_folders import stated_ends
from flowmill.tasks.checks.check import check_config
from flowmill.tasks.inputs.chats import Message
from flowmill.tasks.modalities.tokens.data_texts import chat_tokens
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.stages import ingest
from tests.models.text.test_control_tokens import tokenizer
from tests.support.given import write_jsonl
from tests.support.inside import evaluate, prepare, run_epoch, stored_shards, summary_of
from tests.support.language_models import texts_data

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<image>\n{% endfor %}"
TEMPLATE = f"{TURNS}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
CHAT = [Message("user", "1+1?"), Message("assistant", "2"), Message("user", "And?"), Message("assistant", "4")]


def prompts(
    kind: str = "characters", *, template: str | None = None, ends: tuple[int, ...] = (), **how: Any
) -> Prompts:
    made = tokenizer(kind, template=template)
    if how.pop("nameless", False):
        made.eos_token = None
    return Prompts(made, TokensSection(max_new=100, **how), None, ends=ends)


@pytest.mark.parametrize("text", ["46", " 46", "4</s>6", "\n4"])
@pytest.mark.parametrize("kind", ["characters", "spaced"])
def test_a_completion_has_the_tokens_of_the_whole_text(kind: str, text: str) -> None:
    made = prompts(kind)
    ids, _ = made.completion(text)
    whole = made.tokenizer(f"12+34={text}", split_special_tokens=True).input_ids
    assert [*made.ids("12+34="), *ids] == [*whole, 2]


def test_the_end_token_is_the_tokenizers_or_one_that_a_config_names() -> None:
    assert prompts().completion("a")[0][-1] == 2
    assert prompts(ends=(3,)).completion("a")[0][-1] == 2
    assert prompts(nameless=True, ends=(3, 1)).completion("a")[0][-1] == 3
    assert len(prompts(nameless=True).completion("a")[0]) == 1
    # The one after an answer of the template, if a model may end with several.
    assert prompts(template=TEMPLATE, ends=(1, 3)).completion("a")[0][-1] == 3
    assert prompts(template=TEMPLATE, ends=(1,)).completion("a")[0][-1] == 2


def test_answers_of_chats_end_with_what_the_template_writes() -> None:
    ids, mask = chat_tokens(prompts(template=TEMPLATE, ends=(3,)), CHAT)
    assert [token for token, trained in zip(ids, mask, strict=True) if trained and token < 4] == [3, 3]
    with pytest.raises(ConfigError, match="does not end an answer with the end token '</s>'"):
        chat_tokens(prompts(template=TEMPLATE), CHAT)


def test_answers_of_weight_0_are_read_and_not_learned() -> None:
    made = prompts(template=TEMPLATE, ends=(3,))
    (ids, mask), (same, fewer) = (
        chat_tokens(made, [CHAT[0], CHAT[1]._replace(weight=weight), *CHAT[2:]]) for weight in (1, 0)
    )
    assert ids == same
    assert sum(mask) == 4
    assert fewer == [0] * (len(ids) - 2) + [1, 1]


@pytest.mark.parametrize("text", ["one</s>", "one"])
def test_the_text_of_the_end_token_at_the_end_is_that_token(text: str) -> None:
    made = prompts()
    assert made.completion(text) == ([*made.tokenizer.convert_tokens_to_ids([*"one"]), 2], "one")
    with pytest.raises(ConfigError, match="it ends with '<image>', which would be learned letter by letter"):
        made.completion("one<image>")


def test_ends_are_read_from_all_configs_of_a_folder(tmp_path: Path) -> None:
    texts_data(tmp_path)
    folder = tmp_path / "lm"
    before = stated_ends(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    assert stated_ends(folder) == (9, 11, *before)


def given(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> Any:
    config = texts_data(tmp_path)
    config["data"] = {"train": str(write_jsonl(tmp_path / "given", rows)), "sample": "text", **data}
    config["prompts"] = {"heldout": config["prompts"]["heldout"]}
    config["rollout"]["tokens"]["max_new"] = 6
    config["optimize"] = {"algorithm": "sft"}
    return parse_config(config, where="here")


def test_stored_texts_are_without_the_end_that_was_written(tmp_path: Path) -> None:
    context = prepare(given(tmp_path, [{"prompt": "1+1=", "text": "2<eos>"}, {"prompt": "1+2=", "text": "3"}]))
    (shard,) = stored_shards(context, 0, "ingest")
    assert [shard.text(row) for row in range(2)] == ["2", "3"]
    assert [shard.array("token_mask", row).sum() for row in range(2)] == [2, 2]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_row_whose_prompt_does_not_fit_is_named_or_left_out_as_any_other(tmp_path: Path, split: str) -> None:
    rows = [{"prompt": f"1+{n}=", "text": str(n + 1)} for n in range(6)]
    long = [{"prompt": "1+" * 200 + "1=", "text": "7"}, *rows]
    sources = {"train": rows, "heldout": rows, split: long}
    apart = [{name: f"2{text}" for name, text in row.items()} for row in sources["heldout"]]
    heldout = str(write_jsonl(tmp_path / "apart", apart))
    stopping = given(tmp_path, sources["train"], heldout=heldout)
    check_config(stopping)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1.*has \d+ tokens, but at most"):
        prepare(stopping)
    config = given(tmp_path, sources["train"], heldout=heldout, bad_rows="leave_out")
    check_config(config)
    context = prepare(config)
    # Evaluations sample the prompts of rows that are left.
    evaluate(context, 0)
    run_epoch(context, 1)
    found = [summary_of(context, 0, "ingest", slot) for slot in ("", "heldout")]
    assert [(each["samples"], each["refused"]) for each in found] == [(6, split == name) for name in sources]


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_all_texts_that_cannot_be_read_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(ingest, "_LOOK_S", seconds)
    rows = [{"prompt": f"1+{n}=", "text": "1" * (3 if n == 3 else 9)} for n in range(9, -1, -1)]
    with pytest.raises(DataError) as caught:
        prepare(given(tmp_path, rows, rows_per_shard=2))
    said = str(caught.value)
    if seconds > 0:
        assert said.startswith("9 rows cannot be used:\n")
        assert [f"line {n}" in said for n in range(1, 11)] == [n != 7 for n in range(1, 11)]
        assert said.endswith("\nOr set data.bad_rows to 'leave_out'.")
    else:
        assert "line 1, text: it has 10 tokens, but rollout.tokens.max_new is 6" in said
        assert said.endswith("line 2 on were not read yet.")
