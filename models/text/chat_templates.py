"""Renders chat templates in transformers' immutable sandbox, without access to the clock or randomness.

A template is code of the model that a user chose: it may take any time and memory. A template that writes the date, as
Llama 3.2's does, needs a date in the config, so that equal configs give equal texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError

from flowmill.configs.errors import ConfigError

#: Two times that differ in every field that ``strftime`` can write.
_MOMENTS = (datetime(2001, 2, 3, 4, 5, 6, 7), datetime(2019, 11, 28, 21, 48, 59, 654321))
_READS = (
    "the chat template reads the clock (strftime_now), so the same config would give other texts later. Set {setting} "
    "to a date, as 2024-07-26, which the template then reads instead."
)


def render_chat(
    source: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    setting: str,
    day: date | None = None,
    generate: bool = False,
    more: Mapping[str, Any] | None = None,
) -> str:
    """Return messages, rendered by the chat template of a tokenizer or processor. Raises ConfigError if the text
    depends on the clock, and no date is set; TemplateError if it fails, or uses randomness.

    Args:
        setting: name of the setting of the date, for error messages.
        day: date that the template reads from its clock, at midnight.
        generate: end with the beginning of an answer.
        more: other values the template may read, by name.
    """
    values = {**(more or {}), **_values(source, messages, generate=generate)}
    moments = _MOMENTS if day is None else (datetime(day.year, day.month, day.day),)
    text, *others = (_rendered(source, values, moment.strftime) for moment in moments)
    if any(other != text for other in others):
        raise ConfigError(_READS.format(setting=setting))
    return text


def template_dates(source: Any, messages: Sequence[Mapping[str, Any]], day: date) -> dict[str, str]:
    """Return the dates that a template with ``add_generation_prompt`` reads on a day, by their format; raise
    TemplateError if it fails."""
    now, dates = datetime(day.year, day.month, day.day), dict[str, str]()
    values = _values(source, messages, generate=True)
    _rendered(source, values, lambda form: dates.setdefault(form, now.strftime(form)))
    return dates


def _rendered(source: Any, values: Mapping[str, Any], strftime: Callable[[str], str]) -> str:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(_template_of(source))
    template.environment.filters["random"] = template.environment.globals["lipsum"] = _refused
    try:
        text: str = template.render(**values, strftime_now=strftime)
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateError(f"it takes too much: {type(error).__name__} {error}") from None
    return text


def _refused(*args: Any, **kwargs: Any) -> str:
    raise TemplateError("it draws lots, so the same config would give other texts")


def guard_template(tokenizer: Any) -> None:
    """Wrap a tokenizer's ``apply_chat_template``: first render with two clocks. Calls by pipelines then raise a
    ConfigError if a template reads the clock or fails."""
    original = tokenizer.apply_chat_template
    if not isinstance(getattr(tokenizer, "chat_template", None), str | dict) or hasattr(original, "guarded"):
        return

    @wraps(original)
    def checked(conversation: Any, *args: Any, **how: Any) -> Any:
        several = bool(conversation) and isinstance(conversation[0], list | tuple)
        for messages in conversation if several else [conversation]:
            try:
                render_chat(
                    tokenizer,
                    messages,
                    setting="the template in the model's folder",
                    generate=bool(how.get("add_generation_prompt")),
                    more=how,
                )
            except TemplateError as error:
                raise ConfigError(f"the chat template of a text encoder fails: {error}. Mend the template.") from None
        return original(conversation, *args, **how)

    checked.guarded = True  # type: ignore[attr-defined]
    tokenizer.apply_chat_template = checked


def _values(source: Any, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> dict[str, Any]:
    tokenizer = getattr(source, "tokenizer", source)
    return {
        **tokenizer.special_tokens_map,
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": generate,
    }


def day_of(text: str | None, reward: str) -> date | None:
    """Return the date of a reward's option 'template_date'; raise ValueError if it is not a date."""
    try:
        # YAML parses a date without quotes as a date.
        return text if text is None or isinstance(text, date) else date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"template_date of reward '{reward}' is {text!r}, no date like 2024-07-26") from None


def _template_of(source: Any) -> str:
    """Return the template for chats without tools."""
    template = source.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise TemplateError("there is no chat template")
    return template
