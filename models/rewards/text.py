"""Rewards of texts: a sequence classifier of transformers (such as a reward model), and VADER's lexicon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jinja2 import TemplateError

from flowmill.configs.errors import ConfigError
from flowmill.configs.extras import require_extra
from flowmill.configs.path_types import ModelPlace
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores
from flowmill.models.rewards.device_placement import settled
from flowmill.models.rewards.pretrained import Pretrained
from flowmill.models.text.chat_templates import day_of, render_chat
from flowmill.models.text.control_tokens import as_texts

_NAME = "sequence_classification"
_NO_LIMIT = 1 << 40


@dataclass(kw_only=True)
class SequenceClassification(Pretrained):
    """A logit, or a probability, of a sequence classifier: sentiment, toxicity, or a reward model of one label."""

    name: ClassVar[str] = _NAME
    needs: ClassVar[Needs] = Needs(media="texts", accelerated=True, batch_size=16)

    model: ModelPlace
    """Folder, or id on the hub, of a model with ``AutoModelForSequenceClassification`` and its tokenizer."""
    label: str | int | None = None
    """The scored class, by name or number; not needed for a model of one label."""
    value: Literal["logit", "probability"] = "logit"
    """Its logit, or its probability: softmax over several classes, sigmoid of one."""
    given: Literal["text", "joined", "pair", "chat"] = "text"
    """The classified input: the text; prompt and text as one; both as a pair; the tokenizer's chat template of both."""
    truncate: bool = False
    """Truncate inputs that are too long for the model; otherwise they are an error."""
    template_date: str | None = None
    """Date passed to a chat template that needs one, as 2024-07-26; without it such a template is refused."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""

    def __post_init__(self) -> None:
        """Load the model; raise ConfigError if it cannot be loaded, lacks the label, or has no chat template for
        ``given: chat``."""
        loaded = self.loaded("AutoModelForSequenceClassification")
        self._model = settled(loaded, self.chosen(), getattr(torch, self.dtype))
        self._tokenizer = self.loaded("AutoTokenizer")
        self._pads = _pads_alike(self._tokenizer, loaded.config)
        self._column = _column(self.label, loaded.config)
        if self.given == "chat" and self._tokenizer.chat_template is None:
            raise ConfigError(
                f"reward '{_NAME}': the tokenizer of '{self.model}' has no chat template, so 'given' cannot be 'chat'. "
                "Set it to 'text', 'joined' or 'pair', as the model was trained."
            )
        if self.given == "chat":
            # A template that fails is refused before sampling begins.
            self._chat("prompt", "text")

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> Scores:
        """Return (B,) logits or probabilities; raise ValueError if a text is longer than the model takes."""
        values = [self._value(output.logits.float()) for _, output in self.outputs(media, prompts)]
        return Scores(torch.cat(values).cpu().numpy())

    def outputs(self, media: Sequence[str] | np.ndarray, prompts: Sequence[str], **how: Any) -> Iterator[Any]:
        """Yield the encoded texts and the model's output for them, in one call if it can pad; see ``score``.

        Args:
            media: (B,) texts.
            prompts: B prompts.
            how: further arguments of the model.
        """
        rows = [list(range(len(prompts)))] if self._pads else [[row] for row in range(len(prompts))]
        for chosen in rows:
            texts, own_prompts = [str(media[row]) for row in chosen], [prompts[row] for row in chosen]
            encoded = self._encoded(own_prompts, texts).to(self._model.device)
            yield encoded, self._model(**encoded, **how)

    def _encoded(self, prompts: Sequence[str], texts: Sequence[str]) -> Any:
        most = self._most()
        prompts, texts = (as_texts(self._tokenizer, each) for each in (prompts, texts))
        how = {"return_tensors": "pt", "padding": self._pads}
        if self.truncate and most is not None:
            # Not every tokenizer knows its model's maximum length.
            how |= {"truncation": True, "max_length": most}
        if self.given == "pair":
            encoded = self._tokenizer(list(prompts), list(texts), **how)
        elif self.given == "chat":
            # The template writes the special tokens itself.
            encoded = self._tokenizer(
                [self._chat(*both) for both in zip(prompts, texts, strict=True)], **how, add_special_tokens=False
            )
        else:
            joined = self.given == "joined"
            inputs = [p + t if joined else t for p, t in zip(prompts, texts, strict=True)]
            # The end of a prompt and the beginning of a text may together form a control token.
            encoded = self._tokenizer(as_texts(self._tokenizer, inputs), **how)
        longest = encoded["input_ids"].shape[1]
        if most is not None and longest > most:
            raise ValueError(
                f"a text has {longest} tokens, but '{self.model}' takes {most}; the option 'truncate: true' cuts it"
            )
        return self._with_tokens(encoded)

    def _with_tokens(self, encoded: Any) -> Any:
        """Return encoded texts, of which those without a token have one to be read at: that which begins or ends
        texts."""
        mask = encoded["attention_mask"].bool()
        empty = ~mask.any(1)
        if not empty.any():
            return encoded
        named = (getattr(self._tokenizer, f"{role}_token_id") for role in ("bos", "eos", "cls", "pad"))
        token = next((each for each in named if each is not None), None)
        if token is None:
            raise ValueError(f"a text is empty, and the tokenizer of '{self.model}' has no token for that")
        if not mask.shape[1]:
            encoded.data = {name: torch.zeros(len(mask), 1, dtype=torch.long) for name in encoded}
        encoded["input_ids"][empty, 0], encoded["attention_mask"][empty, 0] = token, 1
        return encoded

    def _chat(self, prompt: str, text: str) -> str:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        setting, day = f"the option 'template_date' of reward '{_NAME}'", day_of(self.template_date, _NAME)
        try:
            return render_chat(self._tokenizer, chat, setting=setting, day=day)
        except TemplateError as error:
            raise ConfigError(
                f"reward '{_NAME}': the chat template of '{self.model}' fails: {error}. Set 'given' to 'text', "
                "'joined' or 'pair', or mend the template."
            ) from None

    def _most(self) -> int | None:
        """Return the model's maximum length in tokens, or None if neither it nor its tokenizer has one."""
        of_model = getattr(self._model.config, "max_position_embeddings", None)
        # Tokenizers without a limit have 10^30.
        lengths = [int(each) for each in (of_model, self._tokenizer.model_max_length) if each and each < _NO_LIMIT]
        return min(lengths, default=None)

    def _value(self, logits: Any) -> Any:
        if self.value == "probability":
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        return logits[:, self._column]


def _pads_alike(tokenizer: Any, config: Any) -> bool:
    """Make a tokenizer pad with the padding token of its model's config; return whether there is one. Otherwise rows
    cannot share a call.

    Classifiers of causal models read the last token that is not that one, so with another token a score would be that
    of a padding. Some models count positions from the first token of a row, so the padding comes last.
    """
    number = config.get_text_config().pad_token_id
    name = tokenizer.convert_ids_to_tokens(number) if number in range(len(tokenizer)) else None
    if name is None:
        return False
    tokenizer.pad_token, tokenizer.padding_side = name, "right"
    return True


def _column(label: str | int | None, config: Any) -> int:
    """Return the index of the scored output; refuse an unknown label, or none where there are several."""
    names = {number: str(config.id2label[number]) for number in range(config.num_labels)}
    numbers = {name: number for number, name in names.items()}
    if label is None and len(names) == 1:
        return 0
    if label in numbers:
        return numbers[str(label)]
    if isinstance(label, int) and label in names:
        return label
    problem = "needs the option 'label'" if label is None else f"has no label {label!r}"
    labels = ", ".join(f"{number} ({name})" for number, name in names.items())
    raise ConfigError(f"reward '{_NAME}' {problem}: the model's are {labels}.")


@dataclass(kw_only=True)
class Lexicon:
    """VADER's sentiment of a text, -1 to 1 (Hutto and Gilbert 2014; package vaderSentiment, its own lexicon)."""

    needs: ClassVar[Needs] = Needs(media="texts")
    bounds: ClassVar[Bounds] = (-1.0, 1.0)

    part: Literal["compound", "pos", "neu", "neg"] = "compound"
    """The normalized sum over all words, -1 to 1, or the share of positive, neutral or negative words, 0 to 1."""

    def __post_init__(self) -> None:
        require_extra("text", "vaderSentiment", label="reward 'lexicon'")
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # type: ignore[import-untyped]

        self._analyzer = SentimentIntensityAnalyzer()

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata) -> list[float]:
        """Return the sentiment of (B,) texts."""
        return [self._analyzer.polarity_scores(str(text))[self.part] for text in media]
