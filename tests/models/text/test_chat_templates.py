"""Chat templates of others: the text that transformers writes, and the same at every hour."""

from __future__ import annotations

from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError

from flowmill.configs.errors import ConfigError
from flowmill.models.quickstart.addition import character_tokenizer
from flowmill.models.text.chat_templates import day_of, guard_template, render_chat

SAID = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2 <é>"}]
#: Llama 3.2's way with the date: its own argument, else the clock, else a date of its authors.
LLAMA = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}Today Date: {{ date_string }}\n{%- for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'] | trim }}{%- endfor %}"
)
#: Mistral Small's: the clock is read, and written where there is no system message alone.
MISTRAL = (
    "{%- set today = strftime_now('%Y-%m-%d') %}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% else %}It is {{ today }}.{% endif %}{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
PLAIN = [
    "{% for message in messages %}\n  [{{ message.role }}] {{ message['content'] }}{{ eos_token }}\n{% endfor %}\n[a]",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ no }}{{ 'a' ~ 1 ~ no }}",
    "{% set ns = namespace(seen='') %}{% for message in messages %}{% set ns.seen = ns.seen ~ message.role %}"
    "{% if loop.last %}{{ loop.index0 }}{{ loop.length }}{% endif %}{% endfor %}{{ ns.seen | upper }}",
    "{% macro said(m) -%}{{ m.content.split('+')[-1].strip('\\n') }}{%- endmacro %}{{ said(messages[1]) }}",
    "{% for message in messages if message.role == 'user' %}{{ message.content | replace('1', 'one') }}{% else %}x"
    "{% endfor %}{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% if loop.first %}{% continue %}{% endif %},"
    "{% endfor %}{{ messages | map(attribute='role') | join('-') }}{{ range(3) | list }}{{ 5 % 3 }}{{ 'a' * 3 }}",
    "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}",
    "{{ '%s and %s' % ('a', 2) }}{{ '{} {:>4}'.format('b', 3) }}{{ '%d' | format(1735689600) }}{{ 1735689600 + 5 }}",
    "{% set x %}{{ messages[0].content }}!{% endset %}{{ x }}{{ add_generation_prompt }}{{ dict(a=1).a }}",
]


def source(template: Any) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(template: Any, said: Any = SAID, **how: Any) -> str:
    return render_chat(source(template), said, setting="here", **how)


@pytest.mark.parametrize("template", PLAIN, ids=range(len(PLAIN)))
@pytest.mark.parametrize("generate", [False, True])
def test_templates_write_what_transformers_writes(template: str, generate: bool) -> None:
    tokenizer = source(template)
    expected = tokenizer.apply_chat_template(SAID, tokenize=False, add_generation_prompt=generate)
    assert render_chat(tokenizer, SAID, setting="here", generate=generate) == expected
    assert expected
    several = source({"default": template, "tool_use": "other"})
    assert render_chat(several, SAID, setting="here", generate=generate) == expected


def test_a_template_that_writes_the_clock_needs_a_date() -> None:
    weekend = "{% if strftime_now('%w') in ('0', '6') %}weekend{% endif %}"
    for template in (LLAMA, "{{ strftime_now('%H:%M:%S.%f') }}", weekend, "{{ 'Nov' in strftime_now('%b') }}"):
        with pytest.raises(ConfigError, match=r"reads the clock \(strftime_now\).*Set here to a date, as 2024-07-26"):
            rendered(template)
    assert rendered(LLAMA, day=date(2024, 7, 26)) == "<bos>Today Date: 26 Jul 2024[system]Add.[user]1+2 <é>"
    assert rendered(weekend, day=date(2024, 7, 27)) == "weekend"
    assert rendered("{{ strftime_now('%H:%M:%S.%f') }}", day=date(2024, 7, 26)) == "00:00:00.000000"


def test_a_template_whose_text_does_not_depend_on_the_clock_needs_none() -> None:
    assert rendered(MISTRAL) == "Add.Add.1+2 <é>"
    with pytest.raises(ConfigError, match="reads the clock"):
        rendered(MISTRAL, SAID[1:])


@pytest.mark.parametrize(
    "template", ["{{ [1, 2] | random }}", "{{ lipsum() }}", "{{ [[1, 2]] | map('random') | list }}"]
)
def test_lots_are_refused(template: str) -> None:
    with pytest.raises(TemplateError, match="draws lots"):
        rendered(template)


def test_templates_cannot_leave_the_sandbox_or_change_what_they_are_given() -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(role='x') }}"):
        with pytest.raises(TemplateError):
            rendered(template)


def test_a_guarded_tokenizer_refuses_what_its_library_would_write() -> None:
    """Pipelines ask their tokenizers by themselves."""
    tokenizer = source("{{ strftime_now('%H:%M:%S.%f') }}{{ messages[0].content }}{{ thinking }}")
    guard_template(tokenizer)
    guard_template(tokenizer)
    for chats in (SAID, [SAID, SAID]):
        with pytest.raises(ConfigError, match="Set the template in the model's folder to a date"):
            tokenizer.apply_chat_template(chats, tokenize=False)
    tokenizer.chat_template = "{{ messages[0].content }}{{ thinking }}"
    assert tokenizer.apply_chat_template(SAID, tokenize=False, thinking="?") == "Add.?"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="the chat template of a text encoder fails: no"):
        tokenizer.apply_chat_template(SAID, tokenize=False)


def test_dates_of_rewards_are_dates() -> None:
    assert day_of("2024-07-26", "mine") == day_of(date(2024, 7, 26), "mine") == date(2024, 7, 26)  # type: ignore[arg-type]
    assert day_of(None, "mine") is None
    with pytest.raises(ValueError, match="template_date of reward 'mine' is 'today', no date like 2024-07-26"):
        day_of("today", "mine")


def test_what_has_no_template_says_so() -> None:
    with pytest.raises(TemplateError, match="there is no chat template"):
        render_chat(SimpleNamespace(chat_template=None, special_tokens_map={}), SAID, setting="here")
