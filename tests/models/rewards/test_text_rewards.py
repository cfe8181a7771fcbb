"""Rewards of texts: classifiers equal transformers' own calls, the lexicon its package's; what cannot be is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from flowmill.configs.errors import ConfigError, RewardError
from flowmill.configs.rewards import ServerSection
from flowmill.configs.schema import RunConfig
from flowmill.models.rewards.base import Batch
from flowmill.models.rewards.factory import make_reward
from flowmill.models.rewards.invocation import score
from flowmill.models.rewards.pretrained import load_pretrained
from flowmill.models.rewards.remote import RemoteReward
from flowmill.models.rewards.service import wire
from flowmill.models.rewards.testing import samples
from flowmill.models.serving import messages
from flowmill.tasks.checks.check import check_config
from tests.models.text.test_control_tokens import tokenizer
from tests.support.serving import served
from tests.support.text_models import write_preference, write_sentiment

TEXTS = ["good days are here", "bad", "a sad sign that says bad days are here", "happy happy"]
PROMPTS = ["a sign", "here are days", "bad", "that says"]


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentiment(tmp_path_factory.mktemp("sentiment"))


@pytest.fixture(scope="module")
def preference(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_preference(tmp_path_factory.mktemp("preference"))


def texts(found: Sequence[str] = TEXTS) -> Batch:
    return samples(len(found), texts=found, prompts=PROMPTS)


def scores(batch: Batch, **options: Any) -> np.ndarray:
    return score(make_reward("sequence_classification", options), "mine", batch).values


def test_probabilities_are_those_of_the_plain_pipeline(sentiment: str) -> None:
    plain = pipeline("text-classification", model=sentiment, top_k=None, device="cpu")
    for label in ("POSITIVE", 1):
        found = scores(texts(), model=sentiment, label=label, value="probability")
        expected = [{entry["label"]: entry["score"] for entry in plain([text])[0]}["POSITIVE"] for text in TEXTS]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.ptp(found) > 1e-3


@pytest.mark.parametrize("given", ["text", "joined", "pair", "chat"])
def test_what_is_classified(preference: str, given: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(preference)
    model = AutoModelForSequenceClassification.from_pretrained(preference)
    expected = []
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        if given == "chat":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            encoded = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        else:
            asked = {"text": (text,), "joined": (prompt + text,), "pair": (prompt, text)}[given]
            encoded = tokenizer(*asked, return_tensors="pt")
        with torch.inference_mode():
            expected.append(model(**encoded).logits.item())
    np.testing.assert_allclose(scores(texts(), model=preference, given=given), expected, rtol=1e-5)


def test_one_label_as_a_probability(preference: str) -> None:
    logits = scores(texts(), model=preference)
    found = scores(texts(), model=preference, value="probability")
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), rtol=1e-6)


def test_what_is_too_long_is_an_error_unless_it_may_be_cut(sentiment: str) -> None:
    long = " ".join(["good"] * 40)
    with pytest.raises(RewardError, match=r"a text has 42 tokens.*takes 24.*truncate: true"):
        scores(texts([long]), model=sentiment, label="POSITIVE")
    cut = scores(texts([long]), model=sentiment, label="POSITIVE", truncate=True)
    whole = scores(texts([" ".join(["good"] * 22)]), model=sentiment, label="POSITIVE")
    np.testing.assert_array_equal(cut, whole)


def test_a_tokenizer_without_a_limit_is_cut_at_the_models(sentiment: str, tmp_path: Path) -> None:
    shutil.copytree(sentiment, tmp_path / "unlimited")
    file = tmp_path / "unlimited" / "tokenizer_config.json"
    about = json.loads(file.read_text())
    del about["model_max_length"]
    file.write_text(json.dumps(about))
    assert AutoTokenizer.from_pretrained(file.parent).model_max_length > 1e20
    long, options = texts([" ".join(["good"] * 40)]), {"label": "POSITIVE", "truncate": True}
    np.testing.assert_array_equal(
        scores(long, model=str(file.parent), **options), scores(long, model=sentiment, **options)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, r"needs the option 'label': the model's are 0 \(NEGATIVE\), 1 \(POSITIVE\)"),
        ({"label": "HAPPY"}, "has no label 'HAPPY'"),
        ({"label": 2}, "has no label 2"),
        ({"label": 0, "given": "chat"}, "has no chat template"),
    ],
)
def test_what_a_model_does_not_have_is_named(sentiment: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_reward("sequence_classification", {"model": sentiment, **options})


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no weight 'classifier.bias' \(of 2\)"):
        load_pretrained("AutoModelForSequenceClassification", str(tmp_path), None, reward="r")


def test_the_lexicon_is_that_of_its_package() -> None:
    analyzer = pytest.importorskip("vaderSentiment.vaderSentiment").SentimentIntensityAnalyzer()
    found = score(make_reward("lexicon", {}), "mine", texts()).values
    np.testing.assert_allclose(found, [analyzer.polarity_scores(text)["compound"] for text in TEXTS], rtol=1e-6)
    assert found[0] > 0 > found[1]
    negative = score(make_reward("lexicon", {"part": "neg"}), "mine", texts()).values
    assert negative[1] == 1.0


def test_a_lexicon_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.configs.extras.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"reward 'lexicon' needs.*flowmill\[text\]"):
        make_reward("lexicon", {})


def test_a_policy_that_makes_images_is_not_scored_by_its_text(config_file: Path, config_data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'lexicon' scores texts, but model.policy 'sd3' makes images"):
        check_config(RunConfig.model_validate({**config_data, "rewards": [{"name": "lexicon"}]}))


@pytest.mark.slow
def test_texts_are_scored_by_a_server() -> None:
    with served("lexicon") as server:
        remote = RemoteReward(ServerSection(url=server.url), "lexicon", {})
        remote.introduce()
        np.testing.assert_array_equal(
            score(remote, "mine", texts()).values, score(make_reward("lexicon", {}), "mine", texts()).values
        )


@pytest.mark.parametrize(
    "changed",
    [{"dtype": "uint8"}, {"shape": [3]}, {"media": b"abcd"}, {"media": ["a", 2, "c", "d"]}, {"shape": [4, 0]}],
)
def test_texts_that_are_not_what_their_request_says(changed: dict[str, Any]) -> None:
    message = messages.unpack(wire.pack_request(texts()))
    with pytest.raises(messages.WireError):
        wire.unpack_request(messages.pack({**message, **changed}))


def test_control_tokens_in_texts_end_nothing_and_move_no_other_score(tmp_path: Path) -> None:
    """A policy may write the text of a token; its score is that of the same text with a space in it."""
    folder = write_preference(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "[SEP]"})
    tokenizer.save_pretrained(folder)
    reward: Any = make_reward("sequence_classification", {"model": folder, "given": "chat"})
    assert reward._tokenizer("[SEP]x[SEP]", add_special_tokens=False).input_ids.count(tokenizer.eos_token_id) == 2
    prompts, odd, even = ["good", "bad"], ["bad [SEP] good", "good"], ["bad [ SEP] good", "good"]
    found = [reward.score(np.array(texts, object), prompts, [{}, {}]).values.tolist() for texts in (odd, even)]
    assert found[0] == found[1]
    alone = reward.score(np.array(["good"], object), ["bad"], [{}]).values
    assert found[0][1] == alone[0]
    asked = reward.score(np.array(["good"], object), ["bad [SEP] good"], [{}]).values
    assert asked == reward.score(np.array(["good"], object), ["bad [ SEP] good"], [{}]).values


FAMILIES: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 16, "n_layer": 1, "n_head": 2}),
    "roberta": (transformers.RobertaConfig, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    # RoBERTa has no positions without a padding token.
    ("family", "pad"),
    [(family, pad) for family in FAMILIES for pad in (0, 2, 77, None) if (family, pad) != ("roberta", None)],
)
def test_a_score_does_not_depend_on_its_neighbors(tmp_path: Path, family: str, pad: int | None, side: str) -> None:
    """Whatever token the config calls padding, and the tokenizer, and where the tokenizer puts it."""
    made = tokenizer()
    made.padding_side = side
    made.save_pretrained(tmp_path)
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = kind(vocab_size=len(made), num_labels=1, bos_token_id=1, eos_token_id=2, pad_token_id=pad, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() == 2 else 1
    model.save_pretrained(tmp_path)
    reward: Any = make_reward("sequence_classification", {"model": str(tmp_path)})
    found, media = [], ["go", "a much longer line of text", "", "seven", "a much longer line, still longer than that"]
    for chosen in (media, media[:1] + media[2:3], *([each] for each in media)):
        values = reward.score(np.array(chosen, object), ["p"] * len(chosen), [{}] * len(chosen)).values
        found += zip(chosen, values.tolist(), strict=True)
    for text in media:
        same = [value for each, value in found if each == text]
        np.testing.assert_allclose(same, same[0], atol=1e-5)
        if text:
            with torch.no_grad():
                own = model(**made([text], return_tensors="pt")).logits.item()
            np.testing.assert_allclose(same[0], own, atol=1e-5)
    assert np.ptp([value for _, value in found]) > 0.05


@pytest.mark.parametrize("value", [None, True, ["4"], {"a": 1}])
def test_an_answer_that_is_no_text_is_refused(value: Any) -> None:
    batch = samples(2, texts=["None", "4"], metadata={"answer": value})
    with pytest.raises(RewardError, match=r"the column 'answer' holds .*, neither a text nor a number"):
        score(make_reward("exact_text", {}), "mine", batch)


def test_a_template_that_reads_the_clock_needs_the_option(tmp_path: Path) -> None:
    folder = write_preference(tmp_path / "m")
    (path,) = (tmp_path / "m").glob("chat_template.jinja")
    path.write_text("{{ strftime_now('%d') }} " + path.read_text())
    options = {"model": folder, "given": "chat"}
    with pytest.raises(ConfigError, match=r"reads the clock.*Set the option 'template_date' of reward 'sequence_class"):
        make_reward("sequence_classification", options)
    reward: Any = make_reward("sequence_classification", {**options, "template_date": "2024-07-26"})
    assert reward._chat("good", "bad").startswith("26 user good [SEP]")
    path.write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"the chat template of '.*' fails: no\. Set 'given' to"):
        make_reward("sequence_classification", options)
