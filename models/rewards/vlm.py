"""A vision language model as the judge, at any endpoint with OpenAI's protocol: vLLM, SGLang, a provider."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
from PIL import Image
from pydantic import Field, PositiveFloat, PositiveInt

from flowmill.configs.errors import ConfigError, RewardError, RewardServiceError
from flowmill.configs.extras import require_extra
from flowmill.configs.option_types import GroupRegex
from flowmill.models.rewards.base import Bounds, Metadata, Needs, Scores, Sources
from flowmill.models.rewards.chat_answers import Answer, first_token, read_answer
from flowmill.models.serving.http_client import UNTIL
from flowmill.models.serving.retry import PassingError, Patience
from flowmill.models.serving.server_client import RefusedError, ServerClient, openai_headers

T = TypeVar("T")
Question: TypeAlias = Annotated[str, Field(pattern=r"\{prompt\}"), "Write {prompt} where the prompt goes."]
_ASK_SCORE = (
    "Rate how well this image shows what the text says, and how good it looks, from 1 (nothing is right) to 5 (all is "
    "right). Text: {prompt}\nEnd with one line: Final Score: N"
)
_ASK_EDIT = (
    "The last image was made from the images before it, by this instruction: {prompt}\nRate from 1 to 5 how well it "
    "carries the instruction out and keeps everything else as it was: 1 if it does not follow the instruction or is "
    "another picture altogether, 3 if it follows in part or changes what it should not, 5 if it does exactly what is "
    "asked and nothing more, without flaws.\nEnd with one line: Final Score: N"
)
_ASK_EDIT_YES = (
    "The last image was made from the images before it, by this instruction: {prompt}\nDoes it do exactly what is "
    "asked, and keep everything else as it was? Answer with one word, yes or no."
)
_ASK_YES = "Does this image show exactly what the text says? Text: {prompt}\nAnswer with one word, yes or no."
#: Questions by the option ``ask``, and whether source images are shown.
_QUESTIONS = {
    ("score", False): _ASK_SCORE,
    ("score", True): _ASK_EDIT,
    ("yes", False): _ASK_YES,
    ("yes", True): _ASK_EDIT_YES,
}
#: Statuses of refusals that concern one request: it is malformed, too large or not allowed.
_OF_REQUEST = (400, 413, 422)
#: Requests one token and the likeliest 20 alternatives, which is OpenAI's limit.
ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
#: Maximum bytes of an answer: those of some ten thousand tokens, each character escaped.
_MOST = 1 << 19
#: Retries of a failing request, and maximum seconds before the first.
_RETRIES, _PAUSE_S = 4, 1.0


@dataclass(kw_only=True)
class Asking:
    """Base class of rewards that ask a model to judge images. They raise RewardError if an answer holds no score or
    the endpoint refuses a request, ConnectionError if it cannot be reached or is overloaded, after several tries."""

    name: ClassVar[str]

    model: str
    """Name of the model at the endpoint."""
    endpoint: str | None = None
    """Address that ends in /v1; defaults to the variable OPENAI_BASE_URL, so that a new address is the same reward."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key; it may be unset, as self-hosted servers need none."""
    size: int | None = 512
    """Images are scaled down to at most this height and width; None: sent unchanged."""
    concurrency: PositiveInt = 8
    """Parallel requests."""
    timeout_s: PositiveFloat = 120.0
    """Seconds for a request."""

    def __post_init__(self) -> None:
        """Make the client; no request is sent yet. Raises ConfigError if the package is not installed, or there is no
        endpoint."""
        require_extra("vlm", "regex", label=f"reward '{self.name}'")
        endpoint = self.endpoint or os.environ.get("OPENAI_BASE_URL")
        if endpoint is None:
            raise ConfigError(
                f"reward '{self.name}' has no endpoint. Set its option 'endpoint', or the variable OPENAI_BASE_URL, to "
                "the address of an OpenAI-compatible server, which ends in /v1."
            )
        self._address = f"{endpoint.rstrip('/')}/chat/completions"
        self._client = ServerClient(
            Patience(0.0, tries=1 + _RETRIES, pause_s=_PAUSE_S),
            timeout_s=self.timeout_s,
            concurrency=self.concurrency,
            follow_redirects=True,
        )

    def map(self, work: Callable[..., T], *rows: Iterable[Any]) -> list[T]:
        """Return the results of a function for every row, ``concurrency`` at a time."""
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="vlm") as pool:
            return list(pool.map(work, *rows))

    def answer(self, image: np.ndarray, question: str, **more: Any) -> Answer:
        """Return the model's answer on an (H, W, 3) uint8 image; see ``answer_images``."""
        return self.answer_images([("", image)], question, **more)

    def answer_images(self, images: Sequence[tuple[str, np.ndarray]], question: str, **more: Any) -> Answer:
        """Return the model's answer on several images. Raises RewardError if the endpoint refuses the request;
        ConnectionError if it cannot be reached or is overloaded, after several tries. ``images``: a caption before
        each, or "", and the image, (H, W, 3) uint8; ``more``: other fields of the request."""
        content: list[dict[str, Any]] = []
        for caption, image in images:
            content += [{"type": "text", "text": caption}] if caption else []
            url = f"data:image/png;base64,{_png(image, self.size)}"
            content += [{"type": "image_url", "image_url": {"url": url}}]
        content += [{"type": "text", "text": question}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0.0, "seed": 0}
        try:
            return self._client.send(
                "POST",
                self._address,
                lambda answer: read_answer(answer.content, until=answer.extensions[UNTIL]),
                most=_MOST,
                json=body | more,
                headers=openai_headers(self.key_variable),
            )
        except PassingError as error:
            raise ConnectionError(f"the endpoint of model '{self.model}' failed: {error}.") from None
        except (RefusedError, ValueError) as error:
            all_refused = isinstance(error, RefusedError) and error.status not in _OF_REQUEST
            raise (RewardServiceError if all_refused else RewardError)(
                f"reward '{self.name}': the endpoint refuses to answer {question!r} with model '{self.model}': "
                f"{error}. Check its name, the key in {self.key_variable} and the endpoint."
            ) from None

    def first_token(self, answer: Answer, question: str) -> dict[str, float]:
        """Return the probabilities of an answer's first token by word. Raises RewardServiceError without any."""
        likely = first_token(answer)
        if not likely:
            raise RewardServiceError(
                f"reward '{self.name}': the endpoint tells no probabilities of tokens for {question!r}; it must "
                "support 'top_logprobs'."
            )
        return likely


@dataclass(kw_only=True)
class VlmJudge(Asking):
    """Asks a model to judge every image.

    ``score``: the number that ``pattern`` finds in the answer, over ``scale``, as UnifiedReward answers (arXiv
    2503.05236). ``yes``: P(yes) / (P(yes) + P(no)) of the answer's first token, as VQAScore (arXiv 2404.01291) and
    Flow-Factory's ``vllm_evaluate``. An answer without a score is an error, never a low score.
    """

    name: ClassVar[str] = "vlm_judge"
    bounds: ClassVar[Bounds] = (0.0, 1.0)

    ask: Literal["score", "yes"] = "score"
    """Ask for a number in the answer, or use the probability of yes."""
    question: Question | None = None
    """Question on every image, with {prompt} for its prompt."""
    pattern: GroupRegex = r"Final Score:\s*\**\s*(\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score in the answer."""
    scale: PositiveFloat = 5.0
    """The highest possible score."""
    max_tokens: int = 512
    """Maximum tokens of an answer, with ``score``."""
    references: bool = False
    """Show the prompt's source images first, and ask how well the edit was done."""

    @staticmethod
    def needs_for(options: Mapping[str, Any]) -> Needs:
        """Return the needs under some options: references where they are shown."""
        return Needs(media="images", references=bool(options.get("references", False)))

    def score(self, media: np.ndarray, prompts: Sequence[str], metadata: Metadata, references: Sources = ()) -> Scores:
        """Return one score per (H, W, 3) uint8 image, 0 to 1, with the answer as a note."""
        answers = self.map(self._judge, media, prompts, references or [()] * len(prompts))
        return Scores(np.array([value for value, _ in answers], np.float32), [text for _, text in answers])

    def _judge(self, image: np.ndarray, prompt: str, started: Sequence[np.ndarray]) -> tuple[float, str]:
        question = (self.question or _QUESTIONS[self.ask, self.references]).replace("{prompt}", prompt)
        more: dict[str, Any] = {"max_tokens": self.max_tokens} if self.ask == "score" else ONE_TOKEN
        shown = edited(started, image) if self.references else [("", image)]
        answer = self.answer_images(shown, question, **more)
        text = answer.text
        value = self._read(answer) if self.ask == "score" else self._probability_of_yes(answer, question)
        if value is None:
            problem = f"'{self.pattern}' finds no score in" if self.ask == "score" else "neither yes nor no begins"
            raise RewardError(
                f"reward 'vlm_judge': {problem} the answer about prompt {prompt!r}: {text[:200]!r}. Ask in another way "
                "(option 'question'), or give the answer more room (option 'max_tokens')."
            )
        return value, text

    def _read(self, answer: Answer) -> float | None:
        """Return the last score in an answer, over the scale; None if there is none, or it is out of range."""
        numbers = answer.find_all(self.pattern)
        if not numbers:
            return None
        value = float(numbers[-1]) / self.scale
        return value if 0 <= value <= 1 else None

    def _probability_of_yes(self, answer: Answer, question: str) -> float | None:
        """Return P(yes) / (P(yes) + P(no)) of the first token; None if neither is among the likely ones."""
        likely = self.first_token(answer, question)
        yes, no = likely.get("yes", 0.0), likely.get("no", 0.0)
        return yes / (yes + no) if yes + no > 0 else None


def edited(started: Sequence[np.ndarray], image: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the source images of a prompt, numbered if there are several, and the edited image, with captions."""
    several = len(started) > 1
    named = [(f"Source image {n}:" if several else "Source image:", each) for n, each in enumerate(started, 1)]
    return [*named, ("Edited image:", image)]


def _png(image: np.ndarray, size: int | None) -> str:
    picture = Image.fromarray(image)
    if size is not None:
        picture.thumbnail((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
