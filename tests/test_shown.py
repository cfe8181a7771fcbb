"""Texts of others, in every place that shows some: nothing there obeys them, and people can read them."""

from __future__ import annotations

import ast
import csv
import io
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from markdown_it import MarkdownIt
from markupsafe import Markup
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from flowmill.configs.escaping import (
    command,
    fenced,
    in_cell,
    in_code,
    in_link,
    in_markdown,
    in_python,
    quoted,
    visible,
)
from flowmill.configs.load import load_config
from flowmill.configs.rewards import RewardSection
from flowmill.configs.tokens import TokensSection
from flowmill.flows import artifacts, progress
from flowmill.flows.cli import app, error_reporting, store
from flowmill.flows.console import _Console, print_table
from flowmill.flows.requests import PipelineRequest
from flowmill.models.policies.diffusion import PipelineCall
from flowmill.tasks.algorithms.resampling import Estimate
from flowmill.tasks.export import card, provenance, usage
from flowmill.tasks.inputs.base_model import BaseModel, License
from flowmill.tasks.metrics import tracked
from flowmill.tasks.metrics.image_grids import grid
from flowmill.tasks.metrics.sweep import Outcome, Variant
from flowmill.tasks.modalities.tokens import exporting as token_exporting
from flowmill.tasks.modalities.tokens.prompts import Prompts
from flowmill.tasks.reports.report import charts, content, headline, page, samples
from flowmill.tasks.tracking import descriptions, models, sweeps

ROOT = Path(__file__).parent.parent
TEXTS = {
    "controls": "a \x1b]0;pwned\x07\x1b[31m \x9b1m \x7f\x00 \u202e b",
    "lines": "a\n\n# b\n- c\n\n    d\r\n> e\u2028f\x85g",
    "html": '<script>x()</script><img src="x" onerror=y> &amp; <!-- </code></p>',
    "markdown": "![x](http://h/t.png) **b** _c_ [l](javascript:x) <http://h> `d` ~~e~~ __f__ \\* [^1]",
    "addresses": "www.h.org http://h.org/x a@b.org WWW.h.org",
    "fence": "```\n~~~ x\n``` `` ` | x | y |",
    "heading": "# a",
    "list": "- a",
    "numbers": "1. a",
    "setext": "===",
    "formula": '=HYPERLINK("http://h","x")',
    "plus": "+1",
    "at": "@SUM(1)",
    "tab": "\t=1",
    "terminal": "[red]x[/red] [/] :smile: [link=http://h]y[/link] [bold",
    "mathematics": "$\\frac{$ $$x$$ _begins",
    "templates": "{{ 7*7 }} {0} {x} %s %(x)s",
    "spaces": "    a  ",
}
PLAIN = "a word"


@pytest.fixture(params=TEXTS.values(), ids=TEXTS)
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_harmless(written: str) -> None:
    assert visible(written, keep="\n") == written


# Terminals.


def on_terminal(monkeypatch: pytest.MonkeyPatch, show: Callable[[], None], module: Any = None) -> str:
    file = io.StringIO()
    shown = _Console(file=file, force_terminal=True, color_system=None, width=400)
    for place in ("flowmill.flows.console.console", "flowmill.flows.progress.console"):
        monkeypatch.setattr(place, shown)
    show()
    return file.getvalue()


def a_table(text: str) -> None:
    table = Table(text, "b", title=text)
    table.add_row(text, Text("fresh"))
    print_table(table)


def lines_of_a_log(text: str) -> None:
    with progress.Lines(1) as lines:
        lines.message(text)
        lines.progress("pipeline", 1, 1, 1, text)
        lines.progress("evaluate", 1, 1, 1, text)


def a_line(text: str) -> None:
    from flowmill.flows import console

    console.console.print(text)
    console.console.print(text, style="yellow")


@pytest.mark.parametrize("show", [a_table, lines_of_a_log, a_line], ids=lambda show: show.__name__)
def test_a_terminal_obeys_no_text(show: Callable[[str], None], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = on_terminal(monkeypatch, lambda: show(text))
    assert_harmless(written.replace("\t", " "))
    words = visible(text, keep="\n\t").replace("\r", "").split()
    assert [word for word in words if word not in written] == []


def test_bars_move_the_cursor_and_nothing_of_a_text_does(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> None:
        with progress.Bars(1) as bars:
            bars.progress("evaluate", 1, 0, 1, text)
            bars.progress("score", 1, 0, 1, text)
            bars.message(text)

    written = on_terminal(monkeypatch, show)
    for command_of_text in ("\x1b]0;", "\x07", "\x1b[31m", "\u202e", "\x9b", "\x00"):
        assert command_of_text not in written


def test_first_and_last_words_are_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from flowmill.configs.errors import ConfigError

    error_reporting.say(text)
    with pytest.raises(SystemExit), error_reporting.report_errors():
        raise ConfigError(text)
    for written in capsys.readouterr():
        assert_harmless(written.replace("\t", " "))


def test_a_text_begins_no_line_of_store_show(text: str) -> None:
    written = store._lines({"prompt": text, "rewards": {text: text}})
    assert len(written) == 2
    assert all(map(str.isprintable, (line.replace("\u202e", "") for line in written)))


@pytest.mark.parametrize("path", [*(ROOT / "flows").rglob("*.py")], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_else_writes_to_the_terminal(path: Path) -> None:
    """Output goes through the console and the first and last words, which make texts visible."""
    if path in (ROOT / "flows/console.py", ROOT / "flows/cli/error_reporting.py"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "typer.echo", "typer.secho", "Console", "Text.from_markup")
            plain = all(isinstance(each, ast.Constant) for each in node.args)
            assert plain or called not in ("sys.stdout.write", "sys.stderr.write", "write"), ast.unparse(node)
            assert "markup" not in {each.arg for each in node.keywords if ast.unparse(each.value) != "False"}


# Markdown.


def structure(markdown: str) -> list[str]:
    """Return what a page makes of Markdown: kinds of blocks and spans, pictures with where they are from.

    Links are left out: there may be one where a name is part of an address. They lead where they should.
    """
    found = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown):
        for each in token.children or [token]:
            if each.type == "html_inline" and each.content in ("<code>", "</code>"):
                continue
            if each.type == "link_open":
                assert str(each.attrs["href"]).startswith(("https://huggingface.co/", "http", *TEXTS.values()))
            elif each.type not in ("text", "code_inline", "text_special", "fence", "link_close"):
                found.append(f"{each.type} {each.attrs.get('src', '')}")
    return found


def reported(markdown: str) -> str:
    """Return the text of what a page makes of Markdown."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)
    return " ".join(each.content for token in tokens for each in token.children or [token])


def a_card(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    config = load_config(ROOT / "configs" / "tiny_sd3.yaml")
    algorithm = config.optimize.algorithm.model_copy(update={"name": text})
    sections = {
        "rewards": tuple(each.model_copy(update={"label": text}) for each in config.rewards),
        "evaluate": config.evaluate.model_copy(update={"solver": text}),
        "optimize": config.optimize.model_copy(update={"algorithm": algorithm}),
        "prompts": config.prompts.model_copy(update={"train": text, "heldout": text}),
    }
    base = BaseModel(source="hub", name=text, revision=text, license=License(id="other", name=text, link=text))
    told_of = card.CardContent(
        config=config.model_copy(update=sections),
        epoch=1,
        base=base,
        base_artifact=text,
        policy=text,
        digest=text,
        prompts=text,
        before={},
        after={text: {text: {"mean": 1.0, "exact": 0.5}}, "heldout": {text: {"mean": 1.0}}},
        picture="images/grid.png",
        lora=None,
        start=text,
    )
    call = usage.Usage(
        pipeline="X",
        loader="X",
        base=text,
        revision=text,
        missing=(),
        loras=("a.safetensors",),
        dtype="float32",
        call=PipelineCall(arguments={"negative_prompt": text}),
        prompt=text,
        seed=1,
        inputs=(),
        fps=None,
    )
    written = card.model_card(told_of, call)
    head, body = written.removeprefix("---\n").split("\n---\n", 1)
    assert_harmless(head)
    assert yaml.safe_load(head)["flowmill"]["policy"] == text
    code = re.search(r"(?s)(`{3,})python\n(.*?)\n\1\n", body)
    assert code is not None
    strings = [node.value for node in ast.walk(ast.parse(code[2])) if isinstance(node, ast.Constant)]
    assert strings.count(text) == 4
    return body


def a_language_models_card(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    config = load_config(ROOT / "configs" / "addition_grpo.yaml")
    algorithm = config.optimize.algorithm.model_copy(update={"name": text})
    tokens = TokensSection(template="chat", system=text, instruction=f"{text}{{prompt}}")
    rollout = config.rollout.model_copy(update={"tokens": tokens})
    optimize = config.optimize.model_copy(update={"algorithm": algorithm})
    config = config.model_copy(update={"optimize": optimize, "rollout": rollout})
    context = SimpleNamespace(
        chain=None,
        plan=None,
        base_folder=None,
        starts_from={"run": text, "policy": text},
    )
    monkeypatch.setattr(token_exporting, "evaluation_figures", lambda chain, epoch: {text: {text: {"mean": 1.0}}})
    monkeypatch.setattr(token_exporting, "data_section", lambda context, epoch: "")
    base = BaseModel(source="folder", name=text, revision=None, license=License(id=text))
    exporting: Any = SimpleNamespace(context=context, config=config, format="lora", epoch=1, inputs=(text, text))
    models = SimpleNamespace(auto="AutoModelForCausalLM", reader="AutoTokenizer", task="text-generation")
    policy: Any = SimpleNamespace(tokenizer=None, models=models)
    monkeypatch.setattr(token_exporting, "prompts_in", lambda *_, **__: Prompts(None, tokens, None))
    written = token_exporting.LanguageModelExport(exporting)._card(base, policy)
    body = written.removeprefix("---\n").split("\n---\n", 1)[1]
    code = re.search(r"(?s)```python\n(.*?)\n```\n", body)
    assert code is not None
    strings = [node.value for node in ast.walk(ast.parse(code[1])) if isinstance(node, ast.Constant)]
    assert {text, f"{text}..."} <= set(strings)
    return body


def a_fitted_reward(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(provenance, "_artifact", lambda store, file: None)
    data = {**dict.fromkeys(("train", "kind", "prompts", "media", "judged"), text), "sources": {text: 1}}
    accuracy = {"mean": 0.5, "low": None, "high": None, "count": 1, "unit": text}
    raters = {text: {"judgments": text, "agreement": 0.5}}
    about = {"backbone": {"name": text}, "data": data, "heldout": {"accuracy": accuracy, "raters": raters}}
    context: Any = SimpleNamespace(store=None)
    section = RewardSection(name="fitted", label=text)
    return provenance._fitted(context, section, ROOT, about)


def a_note(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    config = load_config(ROOT / "configs" / "tiny_sd3.yaml")
    config = config.model_copy(
        update={"rewards": tuple(each.model_copy(update={"label": text}) for each in config.rewards)}
    )
    monkeypatch.setattr(descriptions, "alerts", lambda chain: [SimpleNamespace(text=text)])
    monkeypatch.setattr(tracked, "figures_of", lambda chain, epoch: {text: {text: {"mean": 1.0}}})
    context: Any = SimpleNamespace(
        run=SimpleNamespace(name=text),
        config=config,
        chain=SimpleNamespace(ref=lambda node: node),
        store=SimpleNamespace(manifest=lambda ref: None),
    )
    return descriptions.with_link(
        descriptions.description(context, done=True), {"prefect.flow_run_id": text, "prefect.flow_run_url": text}
    )


def a_registered_version(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    said: dict[str, Any] = {}
    model = SimpleNamespace(model_id="m-1", artifact_location="", tags={})
    monkeypatch.setattr(models, "logged_model", lambda *of: model)
    client: Any = SimpleNamespace(
        log_model_artifacts=lambda *of: None,
        create_model_version=lambda name, **how: said.update(how) or SimpleNamespace(version="1"),
        set_logged_model_tags=lambda *of: None,
    )
    evaluation: Any = SimpleNamespace(
        reward=1.0, policy="", points=[tracked.Point(key=text, value=1.0, step=1, split=text)]
    )
    owner = models.Owner(run=text, run_id="", experiment_id="", kind="lora", rewards=text)
    export = models.Export(epoch=1, folder=Path(), digest="", policy="")
    models._new_version(client, owner, text, evaluation, export)
    return str(said["description"])


def prefects_pages(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    shown: list[str] = []

    def kept(*, key: str, description: str, markdown: str) -> None:
        shown.extend([description, markdown])

    monkeypatch.setattr(artifacts, "create_markdown_artifact", kept)
    artifacts.tracking_link(text, text, f"http{text}")
    artifacts.tracking_link(text, text, f"/{text}")
    artifacts.report_link(text, text, None)
    return "\n\n".join(shown)


PAGES = [a_card, a_language_models_card, a_fitted_reward, a_note, a_registered_version, prefects_pages]


@cache
def made_of_a_word(place: Callable[[str, pytest.MonkeyPatch], Any]) -> Any:
    """Return what a place shows of a text without any sign."""
    with pytest.MonkeyPatch.context() as patched:
        return place(PLAIN, patched)


@pytest.mark.parametrize("place", PAGES, ids=lambda place: place.__name__)
def test_markdown_says_what_a_text_is_and_is_built_as_without_it(
    place: Callable[[str, pytest.MonkeyPatch], str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = place(text, monkeypatch)
    assert_harmless(written)
    assert structure(written) == structure(made_of_a_word(place))
    assert visible(text).strip() in reported(written)
    # Addresses become links without any sign that they are some.
    assert not any(address in written.replace("`", "").split("|") for address in ("www.", "http://h.org"))


# Pages, tables, pictures.


class Tags(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, page_of: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.text = ""
        self.feed(page_of)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))

    def handle_data(self, data: str) -> None:
        self.text += data


def a_report(text: str, monkeypatch: pytest.MonkeyPatch) -> Tags:
    for drawn in ("lines", "histogram"):
        monkeypatch.setattr(charts, drawn, lambda *of, along, unit="": Markup("<svg></svg>"))
    shot = samples.Shot(
        sample_id=text, prompt=text, verdict=text, reward=1.0, image=b"", film=None, text=text, references=[b""]
    )
    # Of the two sides of a pair only one word differs, for any text.
    both = samples.Pair(before=replace(shot, text=f"one {text}"), after=replace(shot, text=f"two {text}"))
    mean = Estimate(mean=0.5, low=0.25, high=0.75)
    run = content.RunReport(
        name=text,
        epochs=(1, 1),
        description=text,
        reward=text,
        headline=headline.Headline(split=text, prompts=20, before=mean, after=mean, change=mean),
        export=(text, text),
        warnings=[text],
        curves={f"monitor/{text}_mean": [(1, 1.0), (2, 2.0)]},
        results=(1, {}, {text: {text: {"mean": 1.0, text: 1.0}}}),
        judges=[text],
        pairs={text: [both]},
        changed=[replace(both, after=replace(both.after, film=b""))],
        data={text: [{text: text}]},
        ingested=[shot],
        best=[shot],
        worst=[replace(shot, film=b"")],
        rewards={1: np.arange(3.0)},
        spreads={1: np.arange(3.0)},
        states={text: 1},
        stale=[text],
        costs=[content.StageCost(stage=text, artifacts=1, seconds=1.0, size=1, speed=text)],
        lineage=[(text, text, [text])],
        config=text,
        settings={text: text},
    )
    written = page.page([run, replace(run, name=f"{text}.", settings={text: f"{text}."})])
    assert_harmless(written.replace("\t", " "))
    return Tags(written)


def test_a_report_is_built_as_without_a_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_report(text, monkeypatch)
    assert found.tags == made_of_a_word(a_report).tags
    assert visible(text, keep="\n\t").replace("\r", "\\r") in found.text.replace("\r", "\\r")


def test_a_chart_takes_any_name() -> None:
    for text in TEXTS.values():
        drawn = Tags(str(charts.lines(text, {text: [(1, 1.0)], "_b": [(1, 2.0)]}, along="epoch")))
        assert "script" not in {tag for tag, _ in drawn.tags}
        assert drawn.text.count(visible(text).strip()) >= 2


def test_a_spreadsheet_computes_nothing(text: str) -> None:
    outcome = Outcome(
        variant=Variant(name=text, settings={text: text, "n": -1}), epoch=1, reward=-0.5, figures={text: -1.0}
    )
    written = sweeps._table([outcome])
    assert_harmless(written.replace("\r\n", "\n"))
    head, row = csv.reader(io.StringIO(written))
    assert (head[3:5], row[2:5]) == (["epoch", "reward"], ["-1", "1", "-0.5"])
    for cell in (*head, *row[:2]):
        assert cell[:1] not in set("=+-@\t\r")
        assert cell.removeprefix("'") in (visible(text), "run", "n", "epoch", "reward")


def test_a_picture_has_room_for_any_prompt(text: str) -> None:
    assert grid([np.zeros((8, 8, 3), np.uint8)], [(text * 3_000, text)]).width == 1280


# The functions that all of this is made of.


def test_what_is_plain_stays_readable() -> None:
    for name in ("tiny-sd3", "jpeg_compressibility", "stabilityai/sd3.5", "on train.txt (8 prompts), a + 2 x b: c."):
        assert in_markdown(name) == name
        assert in_code(name) == f"`{name}`"
        assert quoted(name) == shlex.quote(name)
    assert in_link("MLflow run", "http://h:1/#/x?a=b&c") == "[MLflow run](http://h:1/#/x?a=b&c)"
    assert in_link("LICENSE", "LICENSE") == "[LICENSE](LICENSE)"
    assert in_link("l", "javascript:x") == "l"
    assert fenced("````", "python") == "`````python\n````\n`````"
    assert (in_cell(-1), in_cell("-1"), in_cell("")) == (-1, "'-1", "")


def test_a_string_of_python_and_a_word_of_a_shell_are_the_text(text: str) -> None:
    assert ast.literal_eval(in_python(text)) == text
    assert in_python(text).isprintable()
    text = text.replace("\0", "")
    line = command("printf", "%s", text)
    assert line.isprintable()
    assert subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout.decode() == text


# Commands that people paste.

_NAMES = "|".join(str(each.name or (each.callback and each.callback.__name__)) for each in app.registered_commands)
#: What is only repeated, as "--set x: ...", is not.
_COMMAND = re.compile(rf"flowmill (?:store|{_NAMES})\b[^'`\n;:.]*\0|--[a-z-]+ \0(?!:|$)")
_ROOMS = ("configs", "storage", "models", "tasks", "flows", "flowmill")
SOURCES = [path for room in _ROOMS for path in (ROOT / room).rglob("*.py")]


def pasted(path: Path) -> list[str]:
    """Return the f-strings of a file that put something into a command line as it is."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(each.value) if isinstance(each, ast.Constant) else _placed(each) for each in node.values]
            if _COMMAND.search("".join(parts)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return found


def _placed(part: ast.expr) -> str:
    """Return a sign for what a shell may take apart, and none for what is quoted for it."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    safe = isinstance(value, ast.Call) and ast.unparse(value.func) in ("quoted", "command")
    return "x" if safe else "\0"


def test_what_stands_in_a_command_is_quoted_for_the_shell() -> None:
    assert [line for path in SOURCES for line in pasted(path)] == []


def test_the_search_for_unquoted_commands_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_shown.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        "f\"Say 'flowmill status {run} --why x'\"\nf'Log it: flowmill track {run}'\nf'give --root {root} instead'\n"
        "f\"{a}: 'flowmill store ls' lists {b}\"\nf'flowmill run {quoted(path)}'\nf\"--why '{why}': none\"\n"
    )
    assert [line.split(":")[1] for line in pasted(tmp_path / "a.py")] == ["1", "2", "3"]


def elsewhere(path: Path) -> list[str]:
    """Return the functions of a file that make a command for a run or a store, and do not say in which store."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any(_reads_a_store(each) for each in ast.walk(node)):
            text = ast.unparse(node)
            if not any(way in text for way in ("root_option(", "'--root'", "self.arguments()")):
                found.append(f"{path.relative_to(ROOT)}: {node.name}")
    return found


def _reads_a_store(node: ast.AST) -> bool:
    words = node.args if isinstance(node, ast.Call) and ast.unparse(node.func) == "command" else []
    named = [each.value for each in words if isinstance(each, ast.Constant)]
    # A run that is begun is where its config says, and presets are in no store.
    return named[:1] == ["flowmill"] and named[1:] not in ([], ["run"], ["init"], ["presets"])


def test_a_command_for_a_run_names_its_store() -> None:
    assert [line for path in SOURCES for line in elsewhere(path)] == []


def test_the_search_for_commands_without_their_store_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_shown.ROOT", tmp_path)
    calls = (
        "command('flowmill', 'track', name)",
        "command('flowmill', 'run', 'CONFIG', '--name', name)",
        "command('flowmill', 'track', name, *root_option(root))",
        "command('flowmill', 'run', config)",
    )
    (tmp_path / "a.py").write_text("".join(f"def f{n}():\n    {call}\n" for n, call in enumerate(calls)))
    assert elsewhere(tmp_path / "a.py") == ["a.py: f0", "a.py: f1"]


def test_what_init_and_requests_print_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / 'my $models\' \t"x"'
    printed = CliRunner().invoke(app, ["init", "tiny_sd3", "--to", str(folder)]).output.splitlines()
    config = shlex.split(printed[0]) if not printed[0].startswith("$") else [ast.literal_eval(printed[0][1:])]
    assert config == [str(folder / "tiny_sd3.yaml")]
    assert printed[-1] == f"run it: flowmill run {printed[0]}"
    asked = PipelineRequest(config="a b.yaml", root="/x y/'z'", name="n", overrides=["prompts.train=$HOME/p q.txt"])
    assert shlex.split(asked.command("pipeline"))[1:] == ["run", *asked.arguments()]
