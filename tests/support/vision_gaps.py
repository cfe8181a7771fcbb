"""Log-probs of tiny vision-language models compared with those of transformers' own forward.

``python -m tests.support.vision_gaps`` prints a table of all classes in float32 and bfloat16.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from flowmill.models.maths.generation import Completion, TokenSampling, generate, reading_once
from flowmill.models.maths.tokens import token_log_probs
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.parts import Part
from flowmill.models.policies.vision_lm import VisionLM
from flowmill.models.text.chat_templates import render_chat
from tests.support.vision_classes import CLASSES, write_vision_model

NEW = 10
#: Heights and widths of images, and the images of each prompt.
SIZES = ((40, 24), (17, 90), (64, 64), (40, 24), (8, 50))
CHOICES = ((1,), (4,), (2, 3), (3, 2, 1), (2, 2), (5, 1, 5), (1,))


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in SIZES]


def loaded(folder: Path, kind: str, **settings: Any) -> VisionLM:
    if not folder.exists():
        folder.mkdir()
        write_vision_model(folder, kind)
    return VisionLM.load(folder, PolicySettings(**settings), frozenset({Part.DENOISER}), {})


def chat_of(policy: VisionLM, numbers: tuple[int, ...]) -> str:
    content = [*[{"type": "image"}] * len(numbers), {"type": "text", "text": "What is it?"}]
    return render_chat(policy.pictures.processor, [{"role": "user", "content": content}], setting="", generate=True)


def prompts_of(policy: VisionLM) -> list[list[int]]:
    pixels, pictures, found = images(), policy.pictures, []
    for number, each in enumerate(pixels, 1):
        assert pictures.number(f"image {number}", lambda each=each: each) == number
    for numbers in CHOICES:
        chat = pictures.expanded(chat_of(policy, numbers), numbers)
        ids = pictures.processor.tokenizer(chat, add_special_tokens=False).input_ids
        found.append(pictures.placed(ids, numbers))
        assert pictures.of_row(found[-1]) == list(numbers)
    return found


def drawn(policy: VisionLM, prompts: list[list[int]], **options: Any) -> list[Completion]:
    uniforms = torch.rand(len(prompts), NEW, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return generate(
        reading_once(policy.next_logits, len(prompts) - 1),
        prompts,
        TokenSampling(max_new=NEW, temperature=1.0, eos=frozenset()),
        **{
            "width": max(map(len, prompts)) + 3,
            "uniforms": lambda position: uniforms[:, position],
            "device": torch.device("cpu"),
            "starts": [policy.first_position(prompt) for prompt in prompts],
            **options,
        },
    )


def theirs(policy: VisionLM, numbers: tuple[int, ...], prompt: list[int]) -> dict[str, Any]:
    """Return the output of the class's processor for a prompt with all its images at once."""
    seen = [Image.fromarray(images()[number - 1]) for number in numbers]
    processor = policy.pictures.processor
    found = processor(text=[chat_of(policy, numbers)], images=[seen], return_tensors="pt", add_special_tokens=False)
    assert found.input_ids[0].tolist() == policy.pictures.stored(prompt)
    return dict(found)


class Gaps(NamedTuple):
    """Largest differences of log-probs of drawn tokens."""

    sampler: float
    """Drawn one token at a time with a cache, against the forward of training."""
    replay: float
    """The forward of training, rows of different images together, against the class's own of each row alone."""


def replayed(prompts: Sequence[list[int]], found: Sequence[Completion]) -> torch.Tensor:
    """Return prompts and drawn tokens as rows of training, (B, W) int64."""
    width = -(-max(len(prompt) + NEW for prompt in prompts) // 16) * 16
    rows = torch.full((len(prompts), width), 5)
    for row, (prompt, each) in enumerate(zip(prompts, found, strict=True)):
        rows[row, : len(prompt) + NEW] = torch.tensor([*prompt, *each.ids])
    return rows


@torch.no_grad()
def own_log_probs(policy: VisionLM, prompts: Sequence[list[int]], found: Sequence[Completion]) -> list[torch.Tensor]:
    """Return the log-probs of drawn tokens by the class's own processor and forward, (NEW,) float32 per row."""
    log_probs = []
    for numbers, prompt, each in zip(CHOICES, prompts, found, strict=True):
        given, ids = theirs(policy, numbers, prompt), [*policy.pictures.stored(prompt), *each.ids]
        for name in {"mm_token_type_ids", "token_type_ids"} & set(given):
            given[name] = torch.nn.functional.pad(given[name], (0, NEW))
        given |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        logits = policy.allowed(policy.model(**given, use_cache=False).logits)
        log_probs.append(token_log_probs(logits, given["input_ids"], 1.0)[0, len(prompt) :])
    return log_probs


def gaps_of(policy: VisionLM, prompts: Sequence[list[int]], found: Sequence[Completion]) -> Gaps:
    """Compare drawn tokens with the forward of training, and that with the class's own."""
    rows = replayed(prompts, found)
    with torch.no_grad():
        whole = token_log_probs(policy.forward(rows).logits, rows, 1.0)
    ours = [whole[row, len(prompt) : len(prompt) + NEW] for row, prompt in enumerate(prompts)]
    sampled = [torch.tensor(each.log_probs) for each in found]
    return Gaps(_largest(sampled, ours), _largest(ours, own_log_probs(policy, prompts, found)))


def rounding_of(policy: VisionLM, exact: VisionLM, prompts: Sequence[list[int]], found: Sequence[Completion]) -> float:
    """Return how far the class's own log-probs are from those of the same weights in float32."""
    prompts_of(exact)
    return _largest(own_log_probs(policy, prompts, found), own_log_probs(exact, prompts, found))


def _largest(found: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, others, strict=True))


def table() -> str:
    """Return the gaps of all classes as a Markdown table."""
    transformers.models.smolvlm.processing_smolvlm.num2words = str
    lines = [
        "| class | float32: sampler | replay | bfloat16: sampler | replay | rounding of the class |",
        "|---" * 6 + "|",
    ]
    for kind in CLASSES:
        with tempfile.TemporaryDirectory() as root:
            cells, folder = list[float](), Path(root) / kind
            exact = loaded(folder, kind)
            for dtype in (torch.float32, torch.bfloat16):
                policy = exact if dtype == torch.float32 else loaded(folder, kind, dtype=dtype)
                prompts = prompts_of(policy)
                found = drawn(policy, prompts)
                cells += gaps_of(policy, prompts, found)
            cells.append(rounding_of(policy, exact, prompts, found))
        lines.append(f"| `{kind}` | {' | '.join(f'{value:.1e}' for value in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
