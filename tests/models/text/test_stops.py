"""Stop texts are found from the last tokens of a text at the token at which the whole text shows them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowmill.models.text.continuations import part_text
from flowmill.tasks.modalities.tokens import text as texts
from flowmill.tasks.modalities.tokens.text import Stops
from tests.models.text.test_continuations import llama, words
from tests.models.text.test_control_tokens import tokenizer

SPECIAL = ["<pad>", "<s>", "</s>", "<tool>"]


def made(core: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<tool>"],
    )  # fmt: skip


def byte_level() -> Any:
    """Return a tokenizer as GPT-2 and Qwen have it: of bytes and pairs of letters."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ĠĊ"]
    core = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [("a", "b"), ("Ġ", "Ċ")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made(core)


def byte_fallback() -> Any:
    """Return a tokenizer as SentencePiece makes it: of characters, and bytes of others, which are read in series."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁ab", "----"]
    core = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return made(core)


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "characters": tokenizer,
    "spaced": lambda: tokenizer("spaced"),
    "llama": llama,
    "words": words,
}
#: Characters of random texts, of several bytes or a part of a stop text.
PIECES = ["a", "b", " ", "\n", "é", "é", "。", "。", "🎉", "-", "----", "</s>", "<tool>", "<tool>"]
STOPS = [["ab"], ["éé。"], ["。。"], ["a\n", "b b"], ["🎉é"], [" a"], ["a-", "--b"], ["é<tool>"], ["<tool>"]]
STOPS += [["\ufffda"]]


def drawn(made: Any, source: random.Random) -> list[int]:
    """Return ids of pieces, of which some are cut, with random ids and some of no token between."""
    ids: list[int] = []
    for _ in range(source.randint(5, 60)):
        piece = made(source.choice(PIECES) * source.choice([1, 1, 1, 6]), add_special_tokens=False).input_ids
        ids += piece[: source.choice([len(piece), len(piece), len(piece), 1])]
        ids += [source.randrange(len(made) + 3)] * source.choice([0, 0, 0, 0, 1, 20])
    return ids


def shown(made: Any, stops: Stops, ids: list[int]) -> bool:
    """Return whether the whole text has a stop text."""
    plain, marked = (part_text(made, ids, skip_special_tokens=skip) for skip in (True, False))
    found = any(each in plain for each in stops.plain) or any(each in marked for each in stops.marked)
    return found or ids[-1] in stops.ids


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_text_stops_at_the_token_at_which_the_whole_text_shows_it(kind: str) -> None:
    made, source, ends = KINDS[kind](), random.Random(1), 0
    for number in range(50):
        stops, ids = Stops.of(made, STOPS[number % len(STOPS)]), drawn(made, source)
        for length in range(1, len(ids) + 1):
            stopped = stops.reached(ids[:length])
            assert stopped == shown(made, stops, ids[:length]), (stops.plain, stops.marked, ids[:length])
            if stopped:
                ends += length > 20
                break
    assert ends > 5


def test_a_token_more_of_a_long_text_reads_few(monkeypatch: pytest.MonkeyPatch) -> None:
    made, read = byte_level(), list[int]()

    def counted(tokenizer: Any, ids: Any, **how: Any) -> str:
        read.append(len(ids))
        return part_text(tokenizer, ids, **how)

    monkeypatch.setattr(texts, "part_text", counted)
    ids = made("ba " * 1000 + "</answer>", add_special_tokens=False).input_ids
    stops = Stops.of(made, ["</answer>"])
    assert [stops.reached(ids[:-1]), sum(read) < 50, stops.reached(ids)] == [False, True, True]
