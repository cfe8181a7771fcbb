"""An engine behind a server: honest ones are asked for exactly what is wanted, lies of every kind are errors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flowmill.configs.base import Component
from flowmill.configs.errors import ConfigError, EngineError
from flowmill.models.engines import engine_identity, make_engine
from flowmill.models.engines.base import CompletionRequest
from flowmill.models.engines.openai import OpenAI, write_once
from flowmill.models.maths.generation import TokenSampling
from tests.support.engines import Engine, engine_of
from tests.support.language_models import write_language_model

PROMPTS = [[1, 5, 6, 13, 7, 14], [1, 8, 13, 9, 14], [1, 4, 4, 13, 4, 14]]
Lie = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine") / "lm"
    write_language_model(folder)
    with engine_of(folder) as server:
        yield server


@pytest.fixture
def server(serving: Engine) -> Iterator[Engine]:
    serving.requests.clear()
    serving.keys.clear()
    yield serving
    serving.lie, serving.drip_s, serving.faults = (lambda answer: answer), 0.0, []


def made(server: Engine, **options: Any) -> OpenAI:
    return OpenAI(**{"endpoint": server.url, "model": "tiny", "patience_s": 0.0, "timeout_s": 20.0, **options})


def asked_of(server: Engine, **sampling: Any) -> CompletionRequest:
    eos = server.policy.eos
    about: dict[str, Any] = {"max_new": 4, "temperature": 0.7, "eos": eos, **sampling}
    return CompletionRequest(
        prompts=PROMPTS,
        starts=[len(prompt) for prompt in PROMPTS],
        sampling=TokenSampling(**about),
        stop=(),
        vocabulary=server.policy.vocabulary,
        seeds=[3, 4, (1 << 63) - 1],
        forward=server.policy.next_logits,
        uniforms=lambda position: torch.zeros(3),
        width=16,
        size=4,
        distinct=4,
        device=torch.device("cpu"),
    )


def choice(**changed: Any) -> Lie:
    """Return a lie that changes the only choice."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **changed}]}


def of_choice(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Lie:
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **change(answer["choices"][0])}]}


def log_probs(*values: Any) -> Lie:
    return of_choice(lambda each: {"logprobs": {"token_logprobs": [*values, *[-1.0] * 9][: len(each["token_ids"])]}})


def test_an_honest_server_is_asked_with_everything_written_out(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    engine, asked = made(server, key_variable="ENGINE_KEY"), asked_of(server)
    found = engine.complete(asked)
    again = made(server).complete(asked)
    assert [each.ids for each in found] == [each.ids for each in again], "a seed of its own for every request"
    for prompt, completion in zip(PROMPTS, found, strict=True):
        wanted = server.log_probs([*prompt, *completion.ids])
        assert len(wanted) == len(prompt) + len(completion.log_probs)
        assert completion.finish == ("eos" if completion.ids[-1] in server.policy.eos else "length")
    by_seed = {each["seed"]: each for each in server.requests}
    assert by_seed[(1 << 63) - 1] == {
        "model": "tiny",
        "prompt": PROMPTS[2],
        "n": 1,
        "max_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": (1 << 63) - 1,
        "logprobs": 0,
        "skip_special_tokens": True,
        "stream": False,
        "stop": [],
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(server.policy.eos),
        "ignore_eos": True,
        "return_token_ids": True,
    }
    assert set(server.keys) == {"Bearer secret", None}


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (choice(token_ids=None), "it has text but no token ids"),
        (lambda answer: {**answer, "choices": [{"text": "42", "logprobs": None}]}, "it has text but no token ids"),
        (choice(token_ids=[5, 99, 5, 5]), r"the token id 99, but the policy's vocabulary has the ids 0 to \d+\."),
        (choice(token_ids=[5, -1, 5, 5]), "the token id -1, but"),
        (choice(token_ids=[5, True, 5, 5]), "the token id True, but"),
        (choice(token_ids=[5, "5", 5, 5]), "the token id 5, but"),
        (choice(token_ids=[5, 5.0, 5, 5]), r"the token id 5\.0, but"),
        (choice(token_ids=[5] * 5), "it has 5 tokens, where 1 to 4 were asked for"),
        (choice(token_ids=[]), "it has 0 tokens, where 1 to 4"),
        (choice(token_ids=[2, 5, 5, 5], logprobs={"token_logprobs": [-1.0] * 4}), "token 1 of 4 ends a text, but it"),
        (choice(token_ids=[5, 5], logprobs={"token_logprobs": [-1.0] * 2}), "ended after 2 of 4 tokens with neither"),
        (choice(prompt_token_ids=[1, 2]), "its prompt was not the 6 token ids it was sent"),
        (choice(logprobs=None), "it has no log-probs of its tokens"),
        (choice(logprobs={"token_logprobs": {}}), "it has no log-probs of its tokens"),
        (choice(logprobs={"token_logprobs": [-1.0]}), "it has 1 log-probs for"),
        (log_probs(float("nan")), "nan is the log-prob of a token"),
        (log_probs(float("-inf")), "-inf is the log-prob of a token"),
        (log_probs(0.5), r"0\.5 is the log-prob of a token"),
        (log_probs(None), "None is the log-prob of a token"),
        (log_probs("-1"), "-1 is the log-prob of a token"),
        (log_probs(-(10**400)), "is the log-prob of a token"),
        (lambda answer: {**answer, "choices": []}, "it has 0 choices, where one"),
        (lambda answer: {**answer, "choices": answer["choices"] * 2}, "it has 2 choices, where one"),
        (lambda answer: {**answer, "choices": ["text"]}, "it has 1 choices, where one"),
        (lambda answer: {**answer, "choices": None}, "it has no choices"),
        (lambda answer: [answer], "it has no choices"),
        (lambda answer: b"[" * 20_000, "its answer is no JSON"),
        (lambda answer: b"\xff\xfe", "its answer is no JSON"),
        (lambda answer: b"", "its answer is no JSON"),
        (lambda answer: json.dumps(answer).encode()[:-9], "its answer is no JSON"),
        (lambda answer: json.dumps({**answer, "more": "x" * (1 << 19)}).encode(), "bytes, more than"),
    ],
)
def test_a_lie_is_an_error_that_says_what_it_is(server: Engine, lie: Lie, said: str) -> None:
    server.lie = lie
    with pytest.raises(EngineError, match=said) as error:
        made(server).complete(asked_of(server))
    assert "rollout.tokens.engine 'openai' at http://127.0.0.1" in str(error.value)


@pytest.mark.parametrize("proof", ["prompt_logprobs", "echo"])
def test_weights_are_proved_by_what_is_said_of_a_text(server: Engine, proof: str, tmp_path: Path) -> None:
    ids = [token for prompt in PROMPTS for token in prompt]
    wanted = server.log_probs(ids)[1:]
    made(server, proof=proof, tolerance=1e-4).prove(ids, wanted)
    assert server.requests[-1]["temperature"] == 1.0
    with pytest.raises(EngineError, match=r"a fixed text of 17 tokens its log-probs are 0\.5 nats per token from the"):
        made(server, proof=proof).prove(ids, [each - 0.5 for each in wanted])
    for lie in (
        choice(prompt_logprobs=None, logprobs=None),
        choice(prompt_logprobs=[None], logprobs={"token_logprobs": [None, -1.0]}),
    ):
        server.lie = lie
        with pytest.raises(EngineError, match="it has no log-probs of the 17 tokens of a prompt"):
            made(server, proof=proof).prove(ids, wanted)
    server.lie = choice(prompt_logprobs=[None, *[{}] * 20], logprobs={"token_logprobs": [None, *[None] * 20]})
    with pytest.raises(EngineError, match="None is the log-prob of a token"):
        made(server, proof=proof).prove(ids, wanted)


def test_failures_that_pass_are_tried_again_and_those_that_stay_are_told(server: Engine) -> None:
    server.faults = [500, 429, 503]
    assert len(made(server, patience_s=30.0).complete(asked_of(server))) == 3
    server.faults = [500] * 9
    with pytest.raises(EngineError, match=r"has given no answer for 0 s; the last: .*answers 500: not now"):
        made(server).complete(asked_of(server))
    server.faults = [401] * 9
    with pytest.raises(EngineError, match=r"refuses \(401: not now\)\. Set the variable OPENAI_API_KEY"):
        made(server).complete(asked_of(server))
    server.faults = [302] * 9
    with pytest.raises(EngineError, match=r"refuses \(302: "):
        made(server).complete(asked_of(server))
    gone = OpenAI(endpoint="http://127.0.0.1:9/v1", model="m", patience_s=0.0)
    with pytest.raises(EngineError, match="has given no answer for 0 s; the last: ConnectError"):
        gone.complete(asked_of(server))


def test_a_server_is_reached_before_a_run_begins(server: Engine) -> None:
    made(server).reach()
    # One that has no list of its models answers, too.
    server.faults = [404]
    made(server).reach()
    server.faults = [503, 503]
    made(server, patience_s=30.0).reach()
    server.faults = [401]
    with pytest.raises(EngineError, match=r"/v1/models refuses \(401: .*Set the variable OPENAI_API_KEY"):
        made(server).reach()
    with pytest.raises(EngineError, match=r"has given no answer for 0 s; .*'vllm serve FOLDER"):
        OpenAI(endpoint="http://127.0.0.1:9/v1", model="m", patience_s=0.0).reach()


def test_one_that_drips_or_hangs_is_given_up(server: Engine) -> None:
    server.drip_s = 0.05
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"ReadTimeout: (timed out|the answer was not complete after)"):
        made(server, timeout_s=0.3, concurrency=1).complete(asked_of(server))
    assert time.monotonic() - begun < 5


def test_a_stop_text_ends_where_we_see_it(server: Engine) -> None:
    text = server.policy.tokenizer.decode([5])
    asked = asked_of(server, stopped=lambda ids: text in server.policy.tokenizer.decode(list(ids)))
    server.lie = choice(token_ids=[6, 5, 7, 7], logprobs={"token_logprobs": [-1.0, -2.0, -3.0, -4.0]})
    (first, *_) = made(server).complete(asked)
    assert (first.ids, first.log_probs, first.finish) == ([6, 5], [-1.0, -2.0], "stop")


def test_weights_are_written_once_and_posted(server: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    body = {"lora_name": "mine", "lora_path": "{path}", "path": "{path}", "about": [{"is": "{policy}"}], "n": 1}
    options = {"folder": str(tmp_path / "weights"), "reload": server.reload_url, "reload_body": body}
    engine, written = made(server, **options), list[Path]()

    def write(folder: Path) -> None:
        written.append(folder)
        write_language_model(folder, seed=len(written) - 1)

    for name in ("a", "a", "b", "c", "b"):
        engine.bring(name, write)
    assert len(written) == 3, "what is there is not written again"
    assert [Path(each["path"]).name for each in server.loaded[:2]] == [server.loaded[0]["about"][0]["is"]] * 2
    assert server.loaded[0]["lora_path"] == server.loaded[0]["path"]
    assert {each["key"] for each in server.loaded} == {None}, "the key is the endpoint's"
    assert len(list((tmp_path / "weights").iterdir())) == 2, "the one before stays"
    server.faults = [500]
    with pytest.raises(EngineError, match="answers 500"):
        engine.bring("a", write)
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be written into its option 'folder'"):
        made(server, folder=str(tmp_path / "file" / "in")).bring("a", write)


def test_what_killed_writes_and_removals_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").touch()

    for name, age_s in ((".policy-1-a", 4000), (".policy-1-b", 60), (".other", 4000)):
        write(tmp_path / name)
        for path in (tmp_path / name / "weights", tmp_path / name):
            os.utime(path, (time.time() - age_s,) * 2)
    # A fresh file in an old folder: its write goes on.
    write(tmp_path / ".policy-2-c")
    os.utime(tmp_path / ".policy-2-c", (1, 1))
    removed = list[str]()
    monkeypatch.setattr(
        "flowmill.models.engines.openai.shutil.rmtree", lambda path, ignore_errors: removed.append(path.name)
    )
    for number in range(3):
        write_once(tmp_path / f"policy-{number}", write)
        os.utime(tmp_path / f"policy-{number}", (number + 1, number + 1))
    assert ".policy-1-a" in removed
    assert not {".policy-1-b", ".policy-2-c", ".other", "policy-0"} & set(removed)
    assert not (tmp_path / "policy-0").exists(), "it is renamed before it is removed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoint": "ftp://a"}, "endpoint is 'ftp://a'; .* Begin it with http"),
        ({"endpoint": 5}, "endpoint is 5; it must be a valid string"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be greater than 0"),
        ({"timeout_s": "long"}, "timeout_s is 'long'; it must be a valid number"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"tolerance": -1}, "tolerance is -1"),
        ({"patience_s": -1}, "patience_s is -1"),
        ({"proof": "trust"}, "proof is 'trust'"),
        ({"reload": "http://a/reload"}, "reload needs folder"),
        ({"modle": "m"}, "has no option 'modle'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    given = {"endpoint": "http://a/v1", "model": "m", **options}
    with pytest.raises(ConfigError, match=said):
        make_engine(Component(name="openai", options=given))


def test_where_a_server_is_changes_no_rollout() -> None:
    assert engine_identity(Component(name="local")) == {}
    for endpoint in ("http://a/v1", "http://b/v1"):
        found = engine_identity(Component(name="openai", options={"endpoint": endpoint, "model": "m"}))
        assert found == {"engine": {"name": "openai"}}
    own = engine_identity(Component(name="mine:Engine", options={"beams": 3}))
    assert own == {"engine": {"name": "mine:Engine", "options": {"beams": 3}}}
