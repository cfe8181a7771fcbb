"""The page of ``flowmill rate``: its interface over real HTTP, a kill, and a browser that is used by keyboard."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from flowmill.configs.errors import ConfigError, StoreError
from flowmill.configs.load import parse_config
from flowmill.storage.trajectories.tables import read_rows
from flowmill.tasks.execution.guard import access_token
from flowmill.tasks.ratings.answers import answers_of, commit_preferences
from flowmill.tasks.ratings.app import make_app
from flowmill.tasks.ratings.groups import sources_of
from flowmill.tasks.ratings.request import TOKEN, RateRequest
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.runs.opening import open_run
from tests.support.browser import CHROMIUM, Page, browser
from tests.support.inside import prepare, run_epoch
from tests.support.language_models import texts_data
from tests.support.serving import Server
from tests.tasks.ratings.conftest import HOSTILE

pytestmark = pytest.mark.slow
ANN = {"rater": "ann"}
#: Whether the page waits for an answer, or shows a message or the end.
_READY = "typeof busy !== 'undefined' && !busy && (pair !== null || !at('end').hidden || !at('message').hidden)"


@pytest.fixture
def server(store: Path) -> Iterator[Server]:
    running = Server(["small", "--root", str(store), "--rater", "ann"], name="rate")
    running.start()
    yield running
    running.kill()


def asked(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200
    return answer.text


def test_a_kill_loses_no_answer_and_the_next_server_continues(server: Server, store: Path) -> None:
    with httpx.Client(base_url=server.url) as client:
        state = asked(client.get("/api/group", params=ANN))
        assert (state["rater"], state["done"], state["total"]) == ("ann", 0, 16)
        for header in ({"origin": "http://elsewhere.example"}, {"host": "elsewhere.example"}):
            assert client.get("/api/group", params=ANN, headers=header).status_code == 403, "no page of another origin"
        given = []
        for number, choice in enumerate(("left", "right", "tie", "skip", "left")):
            body = {"group": state["group"]["name"], "rater": "ann", "choice": choice, "seconds": 0.5 + number}
            state = asked(client.post("/api/answer", json=body))
            given.append((body["group"], body["seconds"]))
        assert state["done"] == 5
        back = asked(client.post("/api/undo", json={"rater": "ann"}))
        assert (back["done"], back["group"]["name"]) == (4, given[-1][0]), "the withdrawn pair comes again"
        server.kill()
    found = answers_of(open_run(str(store), "small", reads=True).run)
    assert [(each.preferred, each.seconds) for each in found.values()] == [(1, 0.5), (0, 1.5), (0.5, 2.5), (None, 3.5)]
    server.start()
    with httpx.Client(base_url=server.url) as client:
        assert asked(client.get("/api/group", params=ANN)) == back
        assert asked(client.get("/api/group", params={"rater": "bob"}))["done"] == 0, "raters have their own pairs"


@pytest.fixture
def client(context: RunContext) -> TestClient:
    return asking(context, RateRequest(run="small"))


def asking(context: RunContext, request: RateRequest, token: str | None = None) -> TestClient:
    sources = sources_of(context, None, request.epoch, evaluation=request.evaluation, scorer=request.scorer)
    return TestClient(make_app(context.run, sources, request, token))


def test_what_is_not_right_is_a_message(client: TestClient) -> None:
    state = asked(client.get("/api/group", params=ANN))
    body = {"group": state["group"]["name"], "rater": "ann", "choice": "left", "seconds": 1.0}
    asked(client.post("/api/answer", json=body))
    refused = [
        (client.post("/api/answer", json=body), 409, "'ann' has answered this pair already"),
        (
            client.post("/api/answer", json=body | {"group": "0" * 32}),
            409,
            "The answer is for another question or other samples",
        ),
        (client.post("/api/answer", json=body | {"choice": "both"}), 422, "choice: Input should be 'left', 'right'"),
        (client.post("/api/answer", json=body | {"values": [1, 2]}), 422, "an answer has either a choice or values"),
        (client.post("/api/answer", json=body | {"note": "x" * 501}), 422, "note: String should have at most 500"),
        (client.post("/api/answer", json=body | {"more": "x"}), 422, "more: Extra inputs"),
        (client.post("/api/answer", json=body | {"rater": "<b>"}), 422, "rater: String should match"),
        (client.post("/api/answer", json=body | {"seconds": -1}), 422, "seconds: Input should be greater"),
        (client.post("/api/undo", json={"rater": "bob"}), 409, "'bob' has no answer that could be undone"),
        (client.get("/api/group"), 422, "rater: Field required"),
        (client.get("/api/group", params={"rater": ""}), 422, "rater: String should have at least 1"),
        (client.get("/api/media/none"), 404, "shows no such sample"),
        (client.get(f"/{state['group']['samples'][0]['media']}?start=0"), 404, "starts from 0 images"),
    ]
    for answer, status, message in refused:
        assert answer.status_code == status
        assert message in answer.json()["detail"]


def test_a_store_that_is_not_writable_is_found_before_the_page_opens(
    client: TestClient, context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raters, who cannot mend it, see a message of their own if it happens later."""
    state = asked(client.get("/api/group", params=ANN))
    body = {"group": state["group"]["name"], "rater": "ann", "choice": "left", "seconds": 1.0}
    asked(client.post("/api/answer", json=body))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    second = body | {"group": asked(client.get("/api/group", params=ANN))["group"]["name"]}
    for answer in (client.post("/api/answer", json=second), client.post("/api/undo", json={"rater": "ann"})):
        assert answer.status_code == 409
        assert "is not stored. Say so to the person who serves this page." in answer.json()["detail"]
        assert "--root" not in answer.json()["detail"]
    refusal = r"is not writable, so no answer of raters to run 'small' could be stored\. "
    with pytest.raises(StoreError, match=refusal):
        asking(context, RateRequest(run="small"))
    monkeypatch.undo()
    before = context.store.root.list("runs/small")
    asking(context, RateRequest(run="small"))
    assert context.store.root.list("runs/small") == before
    with monkeypatch.context() as kept:
        kept.setattr(context.store.root, "remove", Mock(side_effect=PermissionError))
        asking(context, RateRequest(run="small"))
    # As in a bucket whose keys may only read.
    monkeypatch.setattr(context.store.root, "create", Mock(side_effect=PermissionError))
    with pytest.raises(StoreError, match=refusal):
        asking(context, RateRequest(run="small"))


def test_the_page_is_blind_and_loads_nothing_from_elsewhere(client: TestClient, context: RunContext) -> None:
    state = asked(client.get("/api/group", params=ANN))
    sources = sources_of(context, None, None, evaluation=False, scorer=None)
    for name in ("small", *(source.artifact.partition("/")[2] for source in sources), sources[0].rows[0]["sample_id"]):
        assert name not in str(state)
    for sample in state["group"]["samples"]:
        answer = client.get(sample["media"])
        assert Image.open(io.BytesIO(answer.content)).size == (32, 16)
        assert answer.headers["content-type"] == "image/png"
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    files = ("", "organizer.html", "common.js", "page.js", "organizer.js", "page.css")
    assert "http" not in "".join(asked_text(client.get(f"/{file}")) for file in files)


def test_other_machines_need_the_token(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match=f"gives other machines access, but {TOKEN} is not set"):
        access_token("0.0.0.0", TOKEN, where="give it to raters")
    monkeypatch.setenv(TOKEN, "secret")
    client = asking(context, RateRequest(run="small"), access_token("0.0.0.0", TOKEN, where="give it to raters"))
    assert client.get("/").status_code == 200, "the page itself has no data"
    assert client.get("/api/group", params=ANN).status_code == 401
    assert TOKEN in client.get("/api/group", params=ANN, headers={"authorization": "Bearer other"}).json()["detail"]
    assert client.get("/api/group", params=ANN, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_body_is_neither_read_without_the_token_nor_beyond_its_limit(context: RunContext) -> None:
    app = asking(context, RateRequest(run="small"), "secret").app
    token = {"authorization": "Bearer secret"}
    requests: dict[str, tuple[int, dict[str, str]]] = {
        "a stranger's": (401, {"content-length": "2"}),
        "a stranger's of unknown size": (401, {"transfer-encoding": "chunked"}),
        "too large": (413, token | {"content-length": "4097"}),
        "of unknown size": (413, token | {"transfer-encoding": "chunked"}),
        "of a size that is no number": (413, token | {"content-length": "1e3"}),
        "of a size with too many digits": (413, token | {"content-length": "9" * 5000}),
    }

    async def unread() -> Any:
        raise AssertionError("the body is read")

    for name, (status, headers) in requests.items():
        for path in ("/api/answer", "/api/undo"):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            pairs = [(key.encode(), value.encode()) for key, value in headers.items()]
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": pairs}
            asyncio.run(app(scope, unread, send))
            assert sent[0]["status"] == status, name
            assert (b"connection", b"close") in sent[0]["headers"], "the rest is not received"
            assert (b"cache-control", b"no-store") in sent[0]["headers"]


def test_the_number_of_pairs_ends_the_work(context: RunContext) -> None:
    client = asking(context, RateRequest(run="small", pairs=2, seed=3))
    names = []
    while (state := asked(client.get("/api/group", params=ANN)))["group"] is not None:
        names.append(state["group"]["name"])
        asked(client.post("/api/answer", json={"group": names[-1], "rater": "ann", "choice": "tie", "seconds": 1}))
    assert len(names) == 2
    assert (state["done"], state["total"]) == (2, 2)
    rows = read_rows(context.store, commit_preferences(context.run))
    assert rows.column("preferred").to_pylist() == [0.5, 0.5]


def test_texts_are_compared_by_the_closest_scores(tmp_path: Path) -> None:
    context = prepare(parse_config(texts_data(tmp_path), where="a run of texts"))
    run_epoch(context, 1)
    slot = context.config.rewards[0].slot
    client = asking(context, RateRequest(run="texts", epoch=1, scorer=slot))
    shown = asked(client.get("/api/group", params=ANN))["group"]
    (source,) = sources_of(context, None, 1, evaluation=False, scorer=slot)
    texts = {row["text"] for row in source.rows}
    left, right = shown["samples"]
    assert left["text"] != right["text"]
    assert {left["text"], right["text"]} <= texts
    assert left["media"] is None


def test_clips_and_start_images_are_shown(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = np.zeros((5, 16, 32, 3), np.uint8)
    starts = [np.full((8, 8, 3), value, np.uint8) for value in (0, 255)]
    monkeypatch.setattr(
        "flowmill.tasks.ratings.groups.RunView.pictures", lambda view, epoch, samples, **_: dict.fromkeys(samples, clip)
    )
    monkeypatch.setattr("flowmill.tasks.ratings.groups.RunView.films", lambda *_, **__: {})
    monkeypatch.setattr(
        "flowmill.tasks.ratings.groups.RunView.references",
        lambda view, epoch, samples, **_: dict.fromkeys(samples, starts),
    )
    for row in (sources := sources_of(context, None, None, evaluation=False, scorer=None))[0].rows:
        row["media_format"] = "mp4"
    client = TestClient(make_app(context.run, sources, RateRequest(run="small"), None))
    shown = asked(client.get("/api/group", params=ANN))["group"]
    found = {client.get(sample["media"]).headers["content-type"] for sample in shown["samples"]}
    # The other source still says that its samples are images: several of one text lie side by side.
    assert found == {"video/mp4", "image/png"}
    images = [Image.open(io.BytesIO(client.get(each).content)) for each in shown["starts"]]
    assert [image.getpixel((0, 0)) for image in images] == [(0, 0, 0), (255, 255, 255)]
    assert client.get(f"{shown['samples'][0]['media']}?start=2").status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_rates_by_keyboard_and_recovers_from_errors(server: Server, store: Path, tmp_path: Path) -> None:
    keys = {"ArrowLeft": 1.0, "ArrowRight": 0.0, "ArrowDown": 0.5, "s": None, "b": 0.5}
    pressed = [*keys] * 2 + ["u", "ArrowRight"]
    with browser(tmp_path / "profile") as page:
        _name(page, server.url)
        _practice(page)
        prompts = []
        for key in pressed:
            prompts.append(page.run("at('prompt').textContent"))
            assert page.run("at('prompt').children.length") == 0
            page.run("note.value = '<b>seen</b>'")
            page.press(key)
            page.wait(_READY)
            assert page.run("note.value") == ""
        assert page.run("at('count').textContent") == "10 of 16"
        assert page.run("at('progress').value") == 10
        assert HOSTILE in prompts, "every prompt comes first"
        assert page.run("document.title") == "Compare samples - flowmill"
        _look(page, tmp_path / "page.png", 1500, 1000)
        boxes = "[...document.querySelectorAll('#sides img')].map(each => each.getBoundingClientRect())"
        assert page.run(f"(([one, other]) => one.top === other.top && one.right < other.left)({boxes})")
        _look(page, tmp_path / "phone.png", 390, 844)
        footer = "document.querySelector('footer').getBoundingClientRect().top"
        assert page.run(f"(([one, other]) => one.bottom < other.top && other.bottom <= {footer})({boxes})")
        _zoom(page)
        assert page.run("at('count').textContent") == "10 of 16", "no key answers while images are enlarged"
        assert [said for said in page.said if '"verbose"' not in said] == []
        _recover(page, server.url)
        for _ in range(4):
            page.press("ArrowDown")
            page.wait(_READY)
        assert "you answered 14 and skipped 2" in page.run("at('thanks').textContent")
    found = list(answers_of(open_run(str(store), "small", reads=True).run).values())
    assert [each.preferred for each in found] == [*[*keys.values()] * 2][:-1] + [0.0, 0.5, 0.0] + [0.5] * 4
    assert [each.both_bad for each in found].count(True) == 1, "the second was taken back"
    assert {each.rater for each in found} == {"ann"}
    assert {each.note for each in found[:10]} == {"<b>seen</b>"}
    assert all(0 <= each.seconds < 60 for each in found)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("task", ["stars", "rank"])
def test_a_browser_gives_stars_and_ranks_and_the_organizer_sees_them(
    task: str, context: RunContext, tmp_path: Path
) -> None:
    options = ["small", "--root", context.store.root.uri, "--epoch", "1", "--task", task, "--question", HOSTILE]
    server = Server(options, name="rate")
    server.start()
    try:
        with browser(tmp_path / "profile") as page:
            page.open(f"{server.url}/?rater=ann")
            page.wait(f"{_READY} && example")
            for key in "123" if task == "rank" else "541":
                page.press(key)
            page.press("Enter")
            page.wait(f"{_READY} && !example && values.length === 4")
            assert page.run("at('question').textContent") == HOSTILE
            page.press("Enter")
            for key in ("2", "1", "1"):
                page.press(key)
            assert page.run("at('done').disabled && marked === 3 && at('count').textContent === '0 of 4'")
            page.run("document.querySelectorAll('.side')[3].querySelector('[data-value=\"4\"]').click()")
            _look(page, tmp_path / "page.png", 1500, 1000)
            _look(page, tmp_path / "phone.png", 390, 844)
            page.run("at('done').click()")
            page.wait(f"{_READY} && at('count').textContent === '1 of 4'")
            page.open(server.organizer)
            page.wait("document.querySelectorAll('td').length > 0")
            assert "ann" in page.run("at('figures').textContent")
            assert HOSTILE in page.run("at('counts').textContent")
            page.run("location.hash = 'wrong'")
            page.send("Page.reload")
            page.wait("document.querySelector('#message:not([hidden])')?.textContent.includes('needs the link')")
            assert [said for said in page.said if '"verbose"' not in said and "401" not in said] == []
            _ask_anew(page, server, options)
    finally:
        server.kill()
    (given,) = answers_of(context.run, HOSTILE).values()
    assert (given.task, given.values) == (task, (2, 1, 1, 4))


def _ask_anew(page: Page, server: Server, options: list[str]) -> None:
    """Start the server with another question while a page is open: the page says that its answer is not stored."""
    page.open(f"{server.url}/?rater=ann")
    page.wait(f"{_READY} && values.length === 4")
    server.kill()
    server.arguments = [*options[:-1], "Which is older?"]
    server.start()
    for key in ("1", "2", "3", "4", "Enter"):
        page.press(key)
    page.wait(f"{_READY} && at('message').textContent.includes('The answer is for another question')")
    assert page.run("at('question').textContent") == "Which is older?"
    assert page.run("at('count').textContent") == "0 of 4"


def _practice(page: Page) -> None:
    """Answer the example, of which nothing is stored: first wrongly, as a message says."""
    page.wait(f"{_READY} && example && at('guide').open")
    page.press("ArrowRight")
    assert page.run("example && at('hint').textContent.startsWith('In this example')")
    page.press("ArrowLeft")
    page.wait(
        f"{_READY} && !example && at('hint').hidden && !at('guide').open && at('count').textContent === '0 of 16'"
    )


def _zoom(page: Page) -> None:
    """Enlarge both images, which the wheel and the pointer move together."""
    page.press("z")
    boxes = "[...at('zoom').querySelectorAll('img')].map(each => each.getBoundingClientRect())"
    before = page.run(f"{boxes}.map(each => each.width)")
    assert len(before) == 2
    page.send("Input.dispatchMouseEvent", type="mouseWheel", x=100, y=100, deltaX=0, deltaY=-400)
    page.wait("scale > 2")
    wide, same = page.run(f"(([one, other]) => [one.width, other.width])({boxes})")
    assert wide == same > 2 * before[0]
    place = page.run("place[0]")
    for kind, x in (("mousePressed", 100), ("mouseMoved", 160), ("mouseReleased", 160)):
        page.send("Input.dispatchMouseEvent", type=kind, x=x, y=100, button="left", buttons=1, clickCount=1)
    assert page.run("place[0]") == place + 60
    assert page.run("at('zoom').open"), "dragging does not close it"
    page.press("ArrowLeft")
    page.press("z")
    page.wait("!at('zoom').open")


def _name(page: Page, url: str) -> None:
    """Enter a name, without which nothing can be answered, and reload the page: it keeps the name, as its link does."""
    page.open(url)
    page.wait(f"{_READY} && example && !at('ask').hidden && document.activeElement === rater")
    for button in ("[data-choice=left]", "#undo"):
        page.run(f"(rater.blur(), document.querySelector('{button}').click())")
        assert page.run("document.activeElement === rater && !busy && at('count').textContent === ''")
    page.run("(rater.value = ' bob ', rater.dispatchEvent(new Event('change')))")
    for name, address in (("bob", url), ("ann", f"{url}/?rater=ann"), ("ann", url)):
        page.wait(f"{_READY} && at('ask').hidden && location.search.startsWith('?rater=')")
        page.run("document.body.id = 'old'")
        page.open(address)
        page.wait(f"document.body?.id === '' && {_READY} && rater.value === '{name}' && at('ask').hidden")


def _recover(page: Page, url: str) -> None:
    """Answer pairs while the server is away, and after another tab has answered the same pair."""
    page.send("Network.enable")
    for offline, message in ((True, "The answers given before are stored."), (False, "has answered this pair already")):
        limits = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.send("Network.emulateNetworkConditions", offline=offline, **limits)
        if not offline:
            body = {"group": page.run("pair.name"), "rater": "ann", "choice": "tie", "seconds": 0.0}
            asked(httpx.post(f"{url}/api/answer", json=body))
        page.press("ArrowRight")
        page.wait(f"at('message').textContent.includes('{message}') && !busy")
    page.press("ArrowRight")
    page.wait("at('count').textContent === '12 of 16' && at('message').hidden && !busy")


def _look(page: Page, file: Path, width: int, height: int) -> None:
    """Take a picture of the page in a window, in which everything must be visible without scrolling sideways."""
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.shoot(file)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert Image.open(file).size == (width, height)
