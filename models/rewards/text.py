"""Rewards of texts: a sequence classifier of transformers (such as a reward model), and VADER's lexicon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from jinja2 import TemplateError

from configs.errors import ConfigError
from configs.extras import require_extra
from configs.path_types import ModelPlace
from models.rewards.base import Bounds, Needs, Scores
from models.rewards.device_placement import settled
from models.rewards.pretrained import load_pretrained
from models.rewards.sizes import Takes, transformer_takes
from models.text.chat_templates import day_of, render_chat
from models.text.control_tokens import as_texts

_NAME = "sequence_classification"
_NO_LIMIT = 1 << 40


@dataclass(kw_only=True)
class SequenceClassification:
    """A logit, or a probability, of a sequence classifier: sentiment, toxicity, or a reward model of one label."""

    needs: ClassVar[Needs] = Needs(media="texts", accelerated=True, batch_size=16, spreads=True)

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
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    device: str = "auto"
    """Torch device, or auto."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the weights."""
    _model: Any = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _column: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it cannot be loaded, lacks the label, or has no chat template for ``given: chat``.
        """
        import torch

        from models.devices import chosen_device, local_rank

        device = chosen_device(self.device, local_rank(), label=f"device of reward '{_NAME}'")
        loaded = load_pretrained("AutoModelForSequenceClassification", self.model, self.revision, reward=_NAME)
        self._model = settled(loaded, device, getattr(torch, self.dtype))
        self._tokenizer = load_pretrained("AutoTokenizer", self.model, self.revision, reward=_NAME)
        self._column = _column(self.label, loaded.config)
        if self.given == "chat" and self._tokenizer.chat_template is None:
            raise ConfigError(
                f"reward '{_NAME}': the tokenizer of '{self.model}' has no chat template, so 'given' cannot be 'chat'. "
                "Set it to 'text', 'joined' or 'pair', as the model was trained."
            )
        if self.given == "chat":
            # A template that fails is refused before sampling begins.
            self._chat("prompt", "text")

    @classmethod
    def takes(cls, options: Mapping[str, Any]) -> Takes | None:
        """Return the memory the model needs on a device, or None if it is not known yet."""
        return transformer_takes(str(options.get("model", "")), str(options.get("dtype", cls.dtype)))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Scores:
        """Return (B,) logits or probabilities.

        Raises:
            ValueError: a text is longer than the model takes.
        """
        import torch

        found = []
        # Without a padding token rows cannot share a call: classifiers of causal models read the last token that is
        # not padding, and another token used as padding could be the text's own end.
        alone = self._tokenizer.pad_token_id is None or self._model.config.pad_token_id is None
        rows = [[row] for row in range(len(prompts))] if alone else [list(range(len(prompts)))]
        for chosen in rows:
            texts, about = [str(media[row]) for row in chosen], [prompts[row] for row in chosen]
            encoded = self._encoded(about, texts, padded=not alone).to(self._model.device)
            with torch.inference_mode():
                found.append(self._value(self._model(**encoded).logits.float()))
        return Scores(torch.cat(found).cpu().numpy())

    def _encoded(self, prompts: Sequence[str], texts: Sequence[str], *, padded: bool) -> Any:
        most = self._most()
        prompts, texts = (as_texts(self._tokenizer, each) for each in (prompts, texts))
        how = {"return_tensors": "pt", "padding": padded}
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
            given = [p + t if joined else t for p, t in zip(prompts, texts, strict=True)]
            # The end of a prompt and the beginning of a text may together form a control token.
            encoded = self._tokenizer(as_texts(self._tokenizer, given), **how)
        longest = encoded["input_ids"].shape[1]
        if most is not None and longest > most:
            raise ValueError(
                f"a text has {longest} tokens, but '{self.model}' takes {most}; the option 'truncate: true' cuts it"
            )
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
        known = [int(each) for each in (of_model, self._tokenizer.model_max_length) if each and each < _NO_LIMIT]
        return min(known, default=None)

    def _value(self, logits: Any) -> Any:
        if self.value == "probability":
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1)
        return logits[:, self._column]


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
    wanted = "needs the option 'label'" if label is None else f"has no label {label!r}"
    known = ", ".join(f"{number} ({name})" for number, name in names.items())
    raise ConfigError(f"reward '{_NAME}' {wanted}: the model's are {known}.")


@dataclass(kw_only=True)
class Lexicon:
    """VADER's sentiment of a text, -1 to 1 (Hutto and Gilbert 2014; package vaderSentiment, its own lexicon)."""

    needs: ClassVar[Needs] = Needs(media="texts")
    bounds: ClassVar[Bounds] = (-1.0, 1.0)

    part: Literal["compound", "pos", "neu", "neg"] = "compound"
    """The normalized sum over all words, -1 to 1, or the share of positive, neutral or negative words, 0 to 1."""
    _analyzer: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the lexicon."""
        require_extra("text", "vaderSentiment", label="reward 'lexicon'")
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # type: ignore[import-untyped]

        self._analyzer = SentimentIntensityAnalyzer()

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the sentiment of (B,) texts."""
        return [self._analyzer.polarity_scores(str(text))[self.part] for text in media]
