"""Given texts have the spaces that a chat template writes around answers, as chats in one row have them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowmill.configs.load import parse_config
from flowmill.configs.tokens import TokensSection
from flowmill.models.policies.language_model_folders import load_tokenizer
from flowmill.models.text.continuations import part_text
from flowmill.tasks.inputs.chats import Message
from flowmill.tasks.modalities.tokens.data_texts import around_answers, chat_tokens
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from tests.models.text.test_control_tokens import tokenizer
from tests.support.given import write_jsonl
from tests.support.inside import prepare, stored_shards
from tests.support.language_models import texts_data
from tests.tasks.modalities.test_given_chats import REFUSED, TEMPLATE

TURNS = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}ANSWER{% endif %}"
END = "{% endfor %}"
#: Templates: one that writes nothing around answers, as most, and as Mistral and Llama 2 have them.
PLAIN, BEFORE, BOTH = (
    TURNS.replace("ANSWER", answer) + END
    for answer in (
        "{{ m.content + eos_token }}",
        "{{ ' ' + m.content | trim + eos_token }}",
        "{{ ' ' + m.content.strip() + ' ' + eos_token }}",
    )
)


@pytest.mark.parametrize("text", ["4", " 4", "4 of it\n", "4</s>"])
@pytest.mark.parametrize("template", [PLAIN, BEFORE, BOTH, TEMPLATE])
@pytest.mark.parametrize("kind", ["characters", "spaced"])
def test_a_text_after_a_prompt_has_the_tokens_of_a_chat(kind: str, template: str, text: str) -> None:
    prompts = Prompts(tokenizer(kind, template=template), TokensSection(system=None), None)
    around = around_answers(prompts)
    ids, words = prompts.completion(text, around)
    chat, mask = chat_tokens(prompts, [Message("user", "2+2="), Message("assistant", words)])
    assert [*prompts.ids("2+2="), *ids] == chat
    assert sum(mask) == len(ids)
    assert words == text.removesuffix("</s>")
    assert around == {BEFORE: (" ", ""), BOTH: (" ", " ")}.get(template, ())


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_template_that_cannot_mark_answers_writes_nothing_around_them(kind: str) -> None:
    assert around_answers(Prompts(tokenizer(template=REFUSED[kind][0]), TokensSection(), None)) == ()


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXTS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": [said("user", "1+2=")], "completion": "3"}]
CHAT = [said("user", "2+1="), said("assistant", "3"), said("user", "2+2=")]
CHATS = [{"prompt": CHAT, "completion": [said("assistant", "4")]}]


def given(folder: Path, rows: list[dict[str, Any]], *, template: str = BEFORE, **data: Any) -> RunContext:
    """Return a run of some rows that begins, with a model of a template."""
    config = texts_data(folder)
    # The model itself is not called, and its own tokenizer knows no spaces.
    tokenizer(template=template).save_pretrained(folder / "lm")
    config["rollout"]["tokens"]["max_new"] = 16
    config["data"] = {"train": str(write_jsonl(folder / "given", rows)), **(data or {"sample": "completion"})}
    config["prompts"] = {"heldout": config["prompts"]["heldout"]}
    config["optimize"] = {"algorithm": "sft"}
    return prepare(parse_config(config, where="here"))


def written(context: RunContext, slot: str = "") -> list[str]:
    reader, (shard,) = load_tokenizer(context.base_folder), stored_shards(context, 0, "ingest", slot)
    return [
        part_text(reader, shard.array("tokens", row)[shard.array("token_mask", row).astype(bool)])
        for row in range(shard.table.num_rows)
    ]


def options(context: RunContext, slot: str = "") -> Any:
    manifest = context.store.manifest(context.chain.require(0, "ingest", slot).ref)
    assert manifest is not None
    return manifest.options.get("around_answers")


def test_all_rows_of_a_run_have_one_form(tmp_path: Path) -> None:
    apart = write_jsonl(tmp_path / "apart", [{"prompt": "3+3=", "completion": "6"}])
    context = given(tmp_path, [*TEXTS, *CHATS], sample="completion", heldout=str(apart))
    assert [written(context), written(context, "heldout")] == [[" 2", " 3", " 4"], [" 6"]]
    assert [options(context), options(context, "heldout")] == [[" ", ""]] * 2
    # It stays recorded where the model is no more.
    shutil.rmtree(tmp_path / "lm")
    again = open_run(context.store.root.uri, "texts", reads=True)
    assert again.chain.require(0, "ingest") == context.chain.require(0, "ingest")


@pytest.mark.parametrize(
    ("rows", "template", "data"),
    [
        (TEXTS, PLAIN, {}),
        (CHATS, BEFORE, {}),
        ([{"messages": [*CHAT, said("assistant", "4")]}], BEFORE, {"messages": "messages"}),
        ([{"completion": "1+1=2"}], BEFORE, {"prompt": "", "sample": "completion"}),
    ],
)
def test_only_texts_that_change_have_another_identity(
    tmp_path: Path, rows: list[dict[str, Any]], template: str, data: dict[str, Any]
) -> None:
    assert options(given(tmp_path, rows, template=template, **data)) is None
