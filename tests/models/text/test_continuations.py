"""Parts of texts and their tokens are those of the whole, also for tokenizers that change the beginning of a text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowmill.configs.errors import ConfigError
from flowmill.models.text.continuations import part_ids, part_text
from flowmill.models.text.control_tokens import split_end
from flowmill.tasks.modalities.tokens.text import Stops, completed_text
from tests.conftest import ROOT
from tests.models.text.test_control_tokens import tokenizer

TEXTS = ["46", " 46", "a b , c . d", "  two", "x\ny", "\nx", "it 's n't . . ."]


def words(**more: Any) -> Any:
    """Return a tokenizer of characters that is no BPE, and that transformers cleans up after."""
    names = ["<pad>", "<unk>", "</s>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=True, **more
    )


def llama() -> Any:
    """Return a tokenizer as Llama 2 has it: a space before every text, and one less in what is decoded."""
    names = ["<pad>", "<s>", "</s>", "▁", *map(chr, range(33, 127)), "\n", "▁4", "▁t"]
    merges = [("▁", "4"), ("▁", "t")]
    core = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


KINDS = {"characters": tokenizer, "spaced": lambda: tokenizer("spaced"), "llama": llama, "words": words}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_part_is_encoded_and_decoded_as_in_the_whole(kind: str, text: str) -> None:
    made = KINDS[kind]()
    before = made("12+34=", add_special_tokens=False).input_ids
    ids = part_ids(made, text)
    assert [*before, *ids] == made(f"12+34={text}", add_special_tokens=False).input_ids
    assert part_text(made, ids) == text
    # A token more is that token's text more: stop texts and rewards get all drawn characters.
    assert "".join(part_text(made, [each]) for each in ids) == text


@pytest.mark.parametrize("kind", list(KINDS))
def test_stop_texts_are_found_where_they_are_written(kind: str) -> None:
    made = KINDS[kind]()
    stops = Stops.of(made, [" ."])
    reached = [stops.reached(part_ids(made, text)) for text in ("a .", " .", "a.", ". ")]
    assert reached == [True, True, False, False]
    assert completed_text(made, [*part_ids(made, " a ."), made.eos_token_id]) == " a ."


def test_the_end_of_a_text_is_the_token_or_refused() -> None:
    made, ends = tokenizer(), {"</s>": 2, "!": 5}
    for text, found in {"one</s>": ("one", 2), "one": ("one", None), "</s>": ("", 2), "no!": ("no!", None)}.items():
        assert split_end(made, text, ends) == found
    for text in ("one<pad>", "one</s>\n", "a <image>"):
        with pytest.raises(ConfigError, match=r"it ends with '<.*>', which would be learned letter by letter"):
            split_end(made, text, ends)
    assert split_end(made, "a</s></s>", ends) == ("a</s>", 2)


#: How GPT-2 and Llama 3 split texts before merges.
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("split", list(SPLITS))
def test_tokenizers_that_add_no_space_give_the_ids_and_texts_that_they_give(split: str) -> None:
    written, draw = (ROOT / "docs" / "own-data.md").read_text(), random.Random(0)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = SPLITS[split], decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([written], trainers.BpeTrainer(vocab_size=1500, initial_alphabet=letters))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    for _ in range(500):
        start = draw.randrange(len(written))
        text = draw.choice(["", " ", "\n", "\n\n", " \n", "\t"]) + written[start : start + draw.randrange(1, 40)]
        ids = made(text, add_special_tokens=False).input_ids
        assert part_ids(made, text) == ids
        cut = ids[: draw.randrange(1, len(ids) + 1)]
        assert part_text(made, cut, skip_special_tokens=False) == made.decode(cut)
