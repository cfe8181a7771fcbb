"""Any server with OpenAI's ``/v1/completions`` that takes and gives token ids: vLLM from 0.10.2 on, or a similar one.

Requests and answers consist of token ids. Answers are not trusted: one that does not match its request is an error, and
the finish reason of a completion is derived from its tokens. Every request sets all parameters that affect sampling, so
that neither the server nor a model's ``generation_config`` adds defaults.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar
from uuid import uuid4

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from flowmill.configs.answers import json_of, text_of
from flowmill.configs.errors import EngineError
from flowmill.configs.escaping import command
from flowmill.configs.fingerprint import hash_text
from flowmill.configs.folders import changed_ns, files_below, share_files
from flowmill.configs.user_directories import user_path
from flowmill.models.engines.answers import Malformed, completion_of, prompt_log_probs_of
from flowmill.models.engines.base import CompletionRequest
from flowmill.models.engines.parallel import mapped
from flowmill.models.maths.generation import Completion
from flowmill.models.serving.retry import PassingError, Patience
from flowmill.models.serving.server_client import RefusedError, ServerClient, openai_headers

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Address: TypeAlias = Annotated[str, Field(pattern="^https?://"), "Begin it with http:// or https://."]
#: Seconds between two checks for new weights.
_LOOK_S = 1.0
#: Maximum bytes of an answer, and additional bytes per token.
_MOST, _MOST_PER_TOKEN = 1 << 18, 1 << 10
_DENIED = frozenset({401, 403})
#: Policies that stay in ``folder``: the server may still read the previous one.
_SAVED = 2
#: Seconds without a change after which a hidden folder is no longer being written or removed.
_ABANDONED_S = 3600.0
_AGAIN = "Committed results stay: give the same command again."


@dataclass(kw_only=True)
class OpenAI:
    """A server at an address; its weights are checked before every rollout and with every batch."""

    endpoint: Address
    """Address that ends in /v1."""
    model: str
    """Name of the model, or of the adapter, at the endpoint."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key; it may be unset, as self-hosted servers need none."""
    timeout_s: PositiveFloat = 300.0
    """Seconds for a request and its whole answer."""
    patience_s: NonNegativeFloat = 120.0
    """Seconds of failures, which are retried, or of other weights than the policy's, after which the run stops."""
    concurrency: PositiveInt = 64
    """Maximum parallel requests; there are never more than execution.rollout_batch_size."""
    tolerance: PositiveFloat = 0.1
    """Mean distance of its log-probs from the policy's, in nats per token, above which its texts are refused."""
    proof: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    """How its log-probs of a text are requested: with vLLM's `prompt_logprobs`, or OpenAI's `echo`."""
    folder: str | None = None
    """Where the policy is written before a rollout, as `from_pretrained` reads it: a place shared with the server."""
    reload: Address | None = None
    """Address that the path is then posted to; it must answer once the server has the weights; needs `folder`."""
    reload_body: dict[str, Any] = field(default_factory=lambda: {"path": "{path}", "policy": "{policy}"})
    """JSON body of that request, with {path} of the folder and {policy}, a name that changes with the weights."""

    def __post_init__(self) -> None:
        """Make the client; no request is sent yet. Raises ValueError if ``reload`` is set without ``folder``."""
        if self.reload is not None and self.folder is None:
            raise ValueError("reload needs folder, where the policy is written that the server is to load.")
        self._client = ServerClient(Patience(self.patience_s), timeout_s=self.timeout_s, concurrency=self.concurrency)

    @property
    def reloads(self) -> bool:
        """Whether this process sends weights to it."""
        return self.folder is not None

    def reach(self) -> None:
        """Wait until the server answers; raise EngineError if it does not, or refuses the key."""
        url = f"{self.endpoint.rstrip('/')}/models"
        with self._failures(url, key=True):
            try:
                self._client.send(
                    "GET", url, lambda answer: None, most=_MOST, headers=openai_headers(self.key_variable)
                )
            except RefusedError as refused:
                # A server without a list of its models answers too.
                if refused.status in (0, *_DENIED):
                    raise

    def bring(self, policy: str, write: Callable[[Path], None]) -> None:
        """Write the policy into the folder, and have the server load it; raise EngineError if the folder cannot be
        written, or the server does not load it."""
        if self.folder is None:
            return
        name = f"policy-{hash_text(policy)[:16]}"
        target = user_path(self.folder).absolute() / name
        try:
            write_once(target, write)
        except OSError as error:
            raise EngineError(
                f"{self._place}: the policy cannot be written into its option 'folder', '{self.folder}': {error}. "
                f"Choose another folder, which the server can read too. {_AGAIN}"
            ) from None
        if self.reload is not None:
            filled = {key: _filled(value, path=str(target), policy=name) for key, value in self.reload_body.items()}
            # The key belongs to the endpoint and is not sent to another address.
            self._post(self.reload, filled, tokens=0, read=lambda answer: None, key=False)

    def prove(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Compare the server's log-probs of a text with the policy's; if ``reloads``, wait until they agree. Raises
        EngineError if they differ."""
        until = time.monotonic() + (self.patience_s if self.reloads else 0.0)
        while True:
            server = self._server_log_probs(ids)
            gaps = [abs(ours - theirs) for ours, theirs in zip(log_probs, server, strict=True)]
            mean = sum(gaps) / len(gaps)
            if mean <= self.tolerance:
                return
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK_S)
        raise EngineError(
            f"{self._place} does not have the weights of the policy: of a fixed text of {len(ids)} tokens its "
            f"log-probs are {mean:.3g} nats per token from the policy's (at most {max(gaps):.3g}), more than its "
            f"option 'tolerance', {self.tolerance:g}. Load the policy into the server (its option 'folder' has it "
            f"written, 'reload' has it loaded), and empty the server's prefix cache. {_AGAIN}"
        )

    def _server_log_probs(self, ids: Sequence[int]) -> list[float]:
        proof = {"echo": True} if self.proof == "echo" else {"prompt_logprobs": 0}
        body = {
            **self._drawing(ids, max_tokens=1, temperature=1.0, seed=0),
            **proof,
            "return_token_ids": self.proof != "echo",
        }
        return self._post(
            self._address, body, tokens=len(ids) + 1, read=lambda answer: prompt_log_probs_of(answer, ids)
        )

    def complete(self, request: CompletionRequest) -> list[Completion]:
        """Return a completion of each prompt, in separate requests, as seeds belong to requests; raise EngineError if
        an answer does not match its request, or the server does not answer."""
        if request.uniforms is None:
            raise EngineError(f"{self._place}: the likeliest tokens are taken by the engine 'local' alone.")
        rows = list(zip(request.prompts, request.seeds, strict=True))
        return mapped(lambda each: self._completed(request, *each), rows, self.concurrency)

    def _completed(self, request: CompletionRequest, prompt: Sequence[int], seed: int) -> Completion:
        sampling = request.sampling
        body = {
            **self._drawing(prompt, max_tokens=sampling.max_new, temperature=sampling.temperature, seed=seed),
            "stop": list(request.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(sampling.eos | sampling.stop_ids),
            # Only the end tokens above apply; the model's files may name others.
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self._post(
            self._address,
            body,
            tokens=sampling.max_new + len(prompt),
            read=lambda answer: completion_of(answer, prompt, sampling, request.vocabulary),
        )

    def _drawing(self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": [int(token) for token in prompt],
            "n": 1,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "logprobs": 0,
            "skip_special_tokens": True,
            "stream": False,
        }

    @property
    def _address(self) -> str:
        return f"{self.endpoint.rstrip('/')}/completions"

    @property
    def _place(self) -> str:
        return f"rollout.tokens.engine 'openai' at {self.endpoint}"

    def _post(self, url: str, body: Mapping[str, Any], *, tokens: int, read: Callable[[Any], T], key: bool = True) -> T:
        """Return the parsed answer to a request, which is retried for a while if it fails."""
        headers = openai_headers(self.key_variable) if key else {}
        most = _MOST + _MOST_PER_TOKEN * tokens
        with self._failures(url, key=key):
            return self._client.send(
                "POST", url, lambda answer: read(_json(answer) if key else None), most=most, json=body, headers=headers
            )

    @contextmanager
    def _failures(self, url: str, *, key: bool) -> Iterator[None]:
        """Name the server, its address and a remedy for failures of requests; ``key``: the key was sent."""
        try:
            yield
        except PassingError as error:
            raise EngineError(
                f"{self._place} has given no answer for {self.patience_s:g} s; the last: {error}. See that the server "
                f"runs: '{command('vllm', 'serve', 'FOLDER', '--served-model-name', self.model)}' starts one. {_AGAIN}"
            ) from None
        except RefusedError as refused:
            hint = f" Set the variable {self.key_variable}." if refused.status in _DENIED and key else ""
            said = f"refuses ({refused})" if refused.status else refused.detail
            raise EngineError(f"{self._place}: {url} {said}.{hint} {_AGAIN}") from None
        except Malformed as error:
            raise EngineError(f"{self._place} gave an answer that cannot be used: {error} {_AGAIN}") from None


def _json(answer: httpx.Response) -> Any:
    try:
        return json_of(answer.content)
    except ValueError:
        raise PassingError(f"its answer is no JSON: {text_of(answer.content)[:80]!r}") from None


def write_once(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder atomically; remove those older than the previous one, and remains of killed ones."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(target)
        try:
            write(temporary)
            share_files(temporary, target.parent)
            try:
                temporary.rename(target)
            except OSError:
                # Another rank was faster: the name has the digest of the weights.
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    others = [path for path in target.parent.glob("policy-*") if path != target and path.is_dir()]
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - _SAVED]:
        with suppress(OSError):
            # Under its name the rest of a killed removal would count as the policy.
            shutil.rmtree(path.rename(_beside(path)), ignore_errors=True)
    for path in target.parent.glob(".policy-*"):
        with suppress(OSError):
            changes = [path.stat().st_mtime_ns, *(changed_ns(path, name) for name in files_below(path))]
            if time.time() - max(changes) / 1e9 > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path) -> Path:
    """Return a new hidden name for a folder that is being written or removed."""
    return folder.with_name(f".{folder.name}-{uuid4().hex}")


def _filled(value: Any, **names: str) -> Any:
    """Return a value with {names} replaced in all texts within it."""
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(each, **names) for key, each in value.items()}
    return [_filled(each, **names) for each in value] if isinstance(value, list) else value
