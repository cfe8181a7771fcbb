"""Chats of several turns: the tokens of the answers are trained on and no others, or the template is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from flowmill.configs.data import DataSection
from flowmill.configs.errors import ConfigError, DataError
from flowmill.configs.load import parse_config
from flowmill.configs.tokens import TokensSection
from flowmill.models.text.continuations import part_text
from flowmill.tasks.inputs.chats import Message
from flowmill.tasks.inputs.data_rows import contents_of, read_data_rows
from flowmill.tasks.modalities.tokens.data_texts import chat_tokens
from flowmill.tasks.modalities.tokens.prompts import Prompts
from tests.models.text.test_control_tokens import HOSTILE, tokenizer
from tests.support.given import write_jsonl
from tests.support.inside import (
    evaluate,
    prepare,
    run_epoch,
    run_stage,
    session_of,
    stored_shards,
    training_data,
    updates_of,
)
from tests.support.language_models import texts_data

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>\n{% endfor %}"
TEMPLATE = f"{TURNS}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
CHAT = [
    Message("user", "1+1?"),
    Message("assistant", "2"),
    Message("user", "And 2+2?"),
    Message("assistant", "4, of course"),
]


def parts(prompts: Prompts, ids: list[int], mask: list[int]) -> list[str]:
    """Return the texts of the spans of equal mask."""
    starts = [0, *(place for place in range(1, len(mask)) if mask[place] != mask[place - 1]), len(mask)]
    first, *others = itertools.pairwise(starts)
    later = [part_text(prompts.tokenizer, ids[a:b], skip_special_tokens=False) for a, b in others]
    return [prompts.tokenizer.decode(ids[slice(*first)]), *later]


@pytest.mark.parametrize("system", [None, "Be brief"])
@pytest.mark.parametrize("kind", ["characters", "spaced"])
def test_answers_and_their_ends_are_trained_on(kind: str, system: str | None) -> None:
    prompts = Prompts(tokenizer(kind, template=TEMPLATE), TokensSection(system=system, max_new=100), None)
    ids, mask = chat_tokens(prompts, CHAT)
    first = f"[system]{system}</s>\n" if system else ""
    assert parts(prompts, ids, mask) == [
        f"{first}[user]1+1?</s>\n[assistant]",
        "2</s>",
        "\n[user]And 2+2?</s>\n[assistant]",
        "4, of course</s>",
    ]


@pytest.mark.parametrize("kind", ["characters", "spaced"])
def test_a_chat_of_one_answer_is_a_prompt_and_a_completion(kind: str) -> None:
    prompts = Prompts(tokenizer(kind, template=TEMPLATE), TokensSection(), None)
    ids, mask = chat_tokens(prompts, CHAT[:2])
    completion, text = prompts.completion("2")
    assert (ids, text) == ([*prompts.ids("1+1?"), *completion], "2")
    assert sum(mask) == len(completion)


def test_a_system_message_of_the_row_replaces_that_of_the_config() -> None:
    prompts = Prompts(tokenizer(template=TEMPLATE), TokensSection(system="Be brief", max_new=50), None)
    ids, mask = chat_tokens(prompts, [Message("system", "Be kind"), *CHAT[:2]])
    assert parts(prompts, ids, mask)[0] == "[system]Be kind</s>\n[user]1+1?</s>\n[assistant]"


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_no_message_ends_a_turn_or_hides_another(text: str, place: int) -> None:
    prompts = Prompts(tokenizer(template=TEMPLATE), TokensSection(max_new=200), None)
    chat = [message._replace(text=text) if number == place else message for number, message in enumerate(CHAT)]
    if chat[place].role == "assistant" and text.endswith(">"):
        with pytest.raises(ConfigError, match=f"message {place + 1}: it ends with '</?s>'.* Remove it"):
            chat_tokens(prompts, chat)
        return
    ids, mask = chat_tokens(prompts, chat)
    assert [ids.count(token) for token in (0, 1, 2, 3)] == [0, 0, 4, 0], "an end for each message"
    found = parts(prompts, ids, mask)
    assert found[1::2] == [f"{chat[1][1]}</s>", f"{chat[3][1]}</s>"]
    assert chat[0][1] in found[0]
    assert chat[2][1] in found[2]


REFUSED = {
    "thoughts that are dropped": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}</s>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
        "renders earlier messages in another way",
    ),
    "another beginning of answers": (
        TURNS + "{% if add_generation_prompt %}[assistant]<think>{% endif %}",
        "renders earlier messages in another way",
    ),
    "no end": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "does not end an answer with the end token '</s>'",
    ),
    "another end": (TEMPLATE.replace("</s>", "<end>"), "does not end an answer with the end token '</s>'"),
    "other answers": (TEMPLATE.replace("m.content", "m.content | upper"), "renders an answer in another way"),
    "no template": (None, "no chat template"),
    "a template that fails": ("{{ messages[0].nothing.more }}", "chat template fails"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_template_that_cannot_mark_answers_is_refused(kind: str) -> None:
    template, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        chat_tokens(Prompts(tokenizer(template=template), TokensSection(max_new=100), None), CHAT)


@pytest.mark.parametrize(
    ("section", "context", "message"),
    [({"max_new": 8}, None, "tokens from its first answer on"), ({"max_new": 60}, 70, "before its first answer")],
)
def test_a_chat_that_is_too_long_is_refused(section: dict[str, Any], context: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_tokens(Prompts(tokenizer(template=TEMPLATE), TokensSection(**section), context), CHAT)


def message(role: str, text: Any = "x") -> dict[str, Any]:
    return {"role": role, "content": text}


WELL = [message("user"), message("assistant", "y")]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no list of messages"),
        ("hello", "no list of messages"),
        ("[" * 10_000, "no list of messages"),
        ([], "a chat of no messages"),
        ([message("user")], "a chat of user; user and assistant take turns"),
        ([message("assistant")], "a chat of assistant"),
        ([*WELL, message("user")], "a chat of user, assistant, user"),
        ([message("user"), *WELL], "a chat of user, user, assistant"),
        ([message("tool"), *WELL], "message 1 has the role 'tool'"),
        ([*WELL[:1], message("assistant", [{"type": "text"}])], "message 2 has {'type': 'text'} as content"),
        ([*WELL[:1], message("assistant", [{"type": "image", "image": "x.png"}])], "message 2 has {'type': 'image'"),
        ([*WELL[:1], message("assistant", None)], "message 2 has no content"),
        ([*WELL[:1], message("assistant", 7)], "message 2 has .*7.* as content; it can be a text"),
        ([*WELL[:1], message("assistant", [])], "message 2 is empty"),
        ([*WELL[:1], message("assistant", " ")], "message 2 is empty"),
        ([*WELL[:1], message("assistant", "\ud800")], "half a character"),
        ([*WELL[:1], "assistant"], "message 2 is 'assistant', no object"),
        ([*WELL[:1], {**WELL[1], "tool_calls": [{"a": 1}]}], "message 2 has 'tool_calls', which is not trained on"),
        ([*WELL[:1], {**WELL[1], "reasoning_content": "so", "x": 0}], "message 2 has 'reasoning_content', 'x'"),
        ([*WELL[:1], {**WELL[1], "weight": 0.5}], "message 2 has the weight 0.5, but answers .* have 0 or 1"),
        ([{**WELL[0], "weight": 1}, WELL[1]], "message 1 has the weight 1, but .* other messages are never trained on"),
        ([*WELL[:1], {**WELL[1], "weight": 0}], "every answer has weight 0"),
    ],
)
def test_a_row_that_is_no_chat_is_named(tmp_path: Path, messages: Any, reason: str) -> None:
    rows = [{"messages": [message("user", "q"), message("assistant", "a")]}, {"messages": messages}]
    source = str(write_jsonl(tmp_path, rows))
    with pytest.raises(DataError, match=f"line 2, messages.*{reason}"):
        read_data_rows(DataSection(train=source, messages="messages"))
    found = read_data_rows(DataSection(train=source, messages="messages", bad_rows="leave_out"))
    assert [row.text for row in found.rows] == ["q"]


def test_chats_are_trained_on(tmp_path: Path) -> None:
    chats = [[(f"{a}+{b}=", str(a + b)), (f"{a}+1=", str(a + 1))] for a in (1, 2) for b in (3, 4)]
    rows = [
        {"messages": [each for asked, said in chat for each in (message("user", asked), message("assistant", said))]}
        for chat in chats
    ]
    data = texts_data(tmp_path)
    data["data"] = {"train": str(write_jsonl(tmp_path / "given", rows)), "messages": "messages"}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["rollout"]["tokens"]["max_new"] = 12
    data["optimize"] = {"learning_rate": 1e-3, "algorithm": "sft", "updates_per_epoch": 1}
    turns = "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    (tmp_path / "lm" / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turns}{{% endfor %}}")
    context = prepare(parse_config(data, where="here"))
    evaluate(context, 0)
    for epoch in (1, 2):
        run_epoch(context, epoch)
    updates = [updates_of(context, epoch)[0] for epoch in (1, 2)]
    assert updates[1]["loss"] < updates[0]["loss"]
    (shard,) = stored_shards(context, 0, "ingest")
    assert shard.table.column("prompt").to_pylist() == [chat[0][0] for chat in chats]
    assert shard.text(0) == "assistant: 4\n\nuser: 1+1=\n\nassistant: 2"
    tokens, mask = shard.array("tokens", 0).tolist(), shard.array("token_mask", 0).tolist()
    assert len(mask) == len("1+3=4") + 1 + len("1+1=2") + 1
    assert mask == [0] * 4 + [1, 1] + [0] * 4 + [1, 1]
    assert tokens[5] == tokens[11]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_rated_chats_are_compared_under_all_their_messages_and_not_their_first(tmp_path: Path, algorithm: str) -> None:
    asked = [message("user", "1+1="), message("assistant", "2")]
    rows = [
        {
            "prompt": [*asked, message("user", f"{number // 2}+9=" * 6)] if number < 4 else asked[:1],
            "completion": [message("assistant", f"{number}2345")],
            "label": number % 2 == 0,
        }
        for number in range(6)
    ]
    data = texts_data(tmp_path)
    source = str(write_jsonl(tmp_path / "given", rows))
    data["data"] = {"train": source, "sample": "completion", "rating": "label"}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["rollout"]["tokens"]["max_new"] = 8
    turns = "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    (tmp_path / "lm" / "chat_template.jinja").write_text(f"{{% for m in messages %}}{turns}{{% endfor %}}")
    computed = []
    for shared in (False, True):
        data["run"]["name"] = f"shared-{shared}"
        data["optimize"] = {"algorithm": algorithm, "updates_per_epoch": 1, "shared_prompts": shared}
        context = prepare(parse_config(data, where="here"))
        run_stage(context, "advantage", 1)
        training, host = training_data(context), session_of(context).host
        samples = training.samples(host)
        (units,) = training.plan(samples)
        if algorithm == "dpo":
            assert sorted(sorted(pair) for pair in units.rows[:, 0].reshape(-1, 2).tolist()) == [[0, 1], [2, 3], [4, 5]]
        batch = samples.batch(units, 8)
        chosen = torch.where(batch.mask, host.trainable(training.policy).log_probs(batch.ids, 1.0, batch.used)[0], 0)
        computed.append({key[0]: float(row) for key, row in zip(batch.keys, chosen.sum(-1), strict=True)})
        samples.pair_prompts(units)
        apart = samples.mismatched(units, 8)
        assert apart.mask.sum(-1).tolist() == batch.mask.sum(-1).tolist() == [6] * 8
    assert computed[0] == pytest.approx(computed[1], abs=1e-5)


def test_only_rated_chats_with_a_history_have_other_identities_than_by_their_first_message(tmp_path: Path) -> None:
    history = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    found = []
    for before in (history[:1], history):
        row = {"prompt": before, "completion": [message("assistant", "d")], "label": True}
        source = str(write_jsonl(tmp_path, [row]))
        sections = (DataSection(train=source, sample="completion", rating=rating) for rating in (None, "label"))
        found += [read_data_rows(section).identity for section in sections]
    earlier = [
        "0ecd1520b0085f53ffa45ab0db9dcd6f",
        "bb5b55f96e2ce87a3780729fcbf3a0b3",
        "53de8b35db3912943c54056ab4c7af6e",
    ]
    assert found[:3] == earlier
    assert found[3] != "0180c4a1d897c9f6444022ae3708ce91"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_chats_are_held_out_by_all_messages_before_the_answer(tmp_path: Path, system: str) -> None:
    """Many chats begin with the same greeting, or with a message of the system, which makes no question another."""

    def rows(name: str, *questions: tuple[str, ...], system: str = "") -> DataSection:
        """Return a section of rows, each with user and assistant in turns and an answer of its own."""
        first = [message("system", system)] if system else []
        prompts = [
            [*first, *(message(("user", "assistant")[turn % 2], text) for turn, text in enumerate(texts))]
            for texts in questions
        ]
        answers = [[message("assistant", f"{name} {number}")] for number in range(len(questions))]
        written = [{"prompt": each, "completion": answer} for each, answer in zip(prompts, answers, strict=True)]
        return DataSection(train=str(write_jsonl(tmp_path / name, written)), sample="completion", bad_rows="leave_out")

    section = rows("train", ("Hello", "Hi", "one and one?"), ("Hello",), ("Hello", "Hi", "one?"), system=system)
    places = [row.place for row in read_data_rows(section).rows]
    assert len(places) == 3
    alone = read_data_rows(section, frozenset({("hello", None)}))
    assert [place for place, _ in alone.refused] == places[1:2]
    held = read_data_rows(rows("heldout", ("Hello", "Hi", "one?"))).rows
    apart = frozenset(content for row in held for content in contents_of(row))
    assert [place for place, _ in read_data_rows(section, frozenset(), apart).refused] == places[2:]
