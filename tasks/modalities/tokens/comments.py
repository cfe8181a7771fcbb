"""Comments between the texts of a conversation, as token ids that the policy did not choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowmill.configs.errors import ConfigError
from flowmill.configs.render import TurnsSection
from flowmill.models.policies.language_model_folders import CONTEXT
from flowmill.models.text.control_tokens import as_text, chat_ids
from flowmill.tasks.inputs.prompts import Prompt, StoredPrompt
from flowmill.tasks.modalities.tokens.prompts import Prompts

#: Private characters for a text and a comment in a rendered chat, and a pair that occurs in neither.
_TEXT, _COMMENT, _UNUSED = "\ue000", "\ue001", ("\ue002", "\ue003")


class Comments:
    """Token ids of comments: a user's message where there is a chat template, else the comment as it is."""

    def __init__(self, prompts: Prompts, turns: TurnsSection) -> None:
        """Bind to tokenizer and template."""
        self._prompts, self._tokenizer, self._turns = prompts, prompts.tokenizer, turns
        self._cached: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}
        self._around(())

    def most(self, images: Sequence[int] = ()) -> int:
        """Return the most tokens between two texts with images by number."""
        return sum(map(len, self._around(images))) + self._turns.comment_tokens

    def after(self, text: Sequence[int], comment: str, images: Sequence[int] = ()) -> list[int]:
        """Return the ids that follow the ids of a text; the end token that closes it is not repeated.

        Args:
            text: its ids.
            comment: the comment on its images.
            images: numbers of those that are seen, before the comment.
        """
        said = self._ids(as_text(self._tokenizer, comment))[: self._turns.comment_tokens]
        before, after = self._around(images)
        closed = before[:1] == [*text[-1:]]
        ids, pictures = [*before[int(closed) :], *said, *after], self._prompts.pictures
        return ids if pictures is None else pictures.placed(ids, images)

    def _around(self, images: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids before and after a comment; those of images as the model's token for them."""
        pictures = self._prompts.pictures
        key = () if pictures is None else tuple(pictures.picture(number).text for number in images)
        if key not in self._cached:
            before, after = _around(self._prompts, images) if self._prompts.chat else ("", "")
            self._cached[key] = self._ids(before), self._ids(after)
        return self._cached[key]

    def _ids(self, text: str) -> list[int]:
        ids = chat_ids(self._tokenizer, text, _UNUSED, begins=False)
        assert ids is not None
        return ids


def _around(prompts: Prompts, images: Sequence[int]) -> tuple[str, str]:
    """Return the rendered text between an answer and the text of a user's next message, and from there to the next
    answer."""
    chat = prompts.render(_COMMENT, [*prompts.messages("."), ("assistant", _TEXT), ("user", _COMMENT)], images)
    before, separator, after = chat.partition(_TEXT)[2].partition(_COMMENT)
    if not separator:
        raise ConfigError(
            "render.turns: the tokenizer's chat template cannot go on after an answer, as it leaves out messages. "
            "Choose a model whose template has turns, or set rollout.tokens.template to 'none'."
        )
    return before, after


def longest_context(
    prompts: Prompts,
    turns: TurnsSection | None,
    context: int | None,
    splits: Mapping[str, Sequence[Prompt | StoredPrompt]],
    images: Sequence[int],
) -> int:
    """Return the most tokens before a text: of the longest prompt and, with turns, of all texts and comments before.

    Args:
        prompts: converts prompts to ids.
        turns: settings of turns, if there are several.
        context: maximum tokens of the model; None: no limit.
        splits: prompts by split.
        images: numbers of images of a text, if they are seen.
    """
    longest, new = prompts.longest(splits), prompts.section.max_new
    if turns is None:
        return longest
    longest += (turns.count - 1) * (new + Comments(prompts, turns).most(images))
    if context is not None and longest + new > context:
        raise ConfigError(
            f"render.turns: a conversation may have {longest + new} tokens, but the model takes {context} ({CONTEXT}). "
            "Lower render.turns.count, render.turns.comment_tokens or rollout.tokens.max_new."
        )
    return longest
