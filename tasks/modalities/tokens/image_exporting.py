"""Exports of models that draw images token by token, for plain calls of transformers or peft."""

from __future__ import annotations

from flowmill.configs.escaping import in_python
from flowmill.models.policies.causal_lm import CausalLM
from flowmill.models.policies.janus import LEAST_SCALE
from flowmill.tasks.inputs.components import tokens_of
from flowmill.tasks.modalities.tokens.exporting import LanguageModelExport, in_python_of
from flowmill.tasks.modalities.tokens.prompts import Prompts, with_places

_USAGE = """processor = AutoProcessor.from_pretrained(".")
{text}
inputs = processor(text=text, generation_mode="image", return_tensors="pt")
drawn = {{"do_sample": True, "temperature": {temperature}, "top_k": 0, "top_p": 1.0}}
ids = model.generate(**inputs, generation_mode="image", guidance_scale={scale}, **drawn)
pixels = list(model.decode_image_tokens(ids).detach().permute(0, 3, 1, 2).float().numpy())
(image,) = processor.postprocess(pixels, return_tensors="PIL.Image.Image")["pixel_values"]
image.save("image.png")"""


class ImageTokenExport(LanguageModelExport):
    """A model folder, or an adapter and the base model's name; with card and settings."""

    def _usage(self, policy: CausalLM) -> str:
        """Return the code that draws an image of a prompt with the loaded model."""
        return _USAGE.format(
            text=_text_of(self._prompts(policy)),
            temperature=tokens_of(self._config).temperature,
            scale=max(LEAST_SCALE, self._config.model.guidance_scale),
        )


def _text_of(prompts: Prompts) -> str:
    """Return the code that makes the text of a prompt as training does."""
    prompt = prompts.section.instructed("...")
    if not prompts.chat:
        return f"text = {in_python(prompt)}"
    messages = with_places([{"role": role, "content": text} for role, text in prompts.messages(prompt)], [])
    return (
        f"messages = {in_python_of(messages)}\n"
        "text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)"
    )
