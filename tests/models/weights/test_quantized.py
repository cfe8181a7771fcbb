"""Quantized layers compute, and give gradients, as their dequantized weights do, and no copy of these is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from flowmill.configs.errors import ConfigError
from flowmill.configs.model import QuantizeSection
from flowmill.models.maths.conditioning import Conditioning
from flowmill.models.memory.tracing import PeakMemory
from flowmill.models.policies.base import PolicySettings
from flowmill.models.policies.causal_lm import CausalLM, TrainableLM
from flowmill.models.policies.diffusion import DiffusionSettings
from flowmill.models.policies.flux3 import Flux3
from flowmill.models.policies.parts import Part
from flowmill.models.policies.pipeline import PipelinePolicy
from flowmill.models.policies.sd3 import SD3
from flowmill.models.quickstart.addition import character_tokenizer
from flowmill.models.quickstart.tiny import build_tiny
from flowmill.models.weights.int4 import GROUP, PackedInt4
from flowmill.models.weights.lora import LoraSpec
from flowmill.models.weights.quantized import (
    check_quantizer,
    dequantized,
    dequantizing_bytes,
    is_quantized,
    largest_layer,
    weight_bytes,
)
from flowmill.tasks.runtime.devices import module_bytes

#: The largest distance of a quantized weight, in largest weights of its row or group.
STEPS = {"int8": 1 / 250, "float8": 1 / 16, "int4": 1 / 7, "nf4": 1 / 6}
LORA = LoraSpec(rank=2, alpha=4, targets=("q_proj", "down_proj"))
BOTH = frozenset({Part.DENOISER, Part.TEXT})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model whose layers have 64 and 128 inputs."""
    return written(tmp_path_factory.mktemp("lm"), 64)


def written(place: Path, width: int) -> Path:
    """Write a language model with a head that is its embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=16, **sizes, tie_word_embeddings=True, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


def loaded(folder: Path, quantizer: str | None, dtype: torch.dtype = torch.float32) -> CausalLM:
    if quantizer == "nf4":
        pytest.importorskip("bitsandbytes")
    section = None if quantizer is None else QuantizeSection.model_validate({"name": quantizer})
    made = CausalLM.load(folder, PolicySettings(dtype=dtype, quantize=section), BOTH, {})
    return made.computing_dequantized(section, BOTH)


def linear(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}


def unpacked(module: nn.Module, plain: nn.Module) -> None:
    """Give a plain copy of a model the numbers of its quantized weights."""
    for name, layer in linear(plain).items():
        weight = linear(module)[name].weight
        if is_quantized(weight):
            layer.weight.data = dequantized(weight, torch.float32).to(layer.weight.dtype)


@pytest.mark.parametrize("quantizer", STEPS)
def test_weights_are_near_and_the_head_stays(folder: Path, quantizer: str) -> None:
    found, plain = linear(loaded(folder, quantizer).model), linear(loaded(folder, None).model)
    assert {name for name, layer in found.items() if not is_quantized(layer.weight)} == {"lm_head"}
    for name, layer in plain.items():
        if name != "lm_head":
            near = (dequantized(found[name].weight, torch.float32) - layer.weight).abs().max()
            assert 0 < near < STEPS[quantizer] * layer.weight.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizer", STEPS)
def test_adapters_get_the_gradients_of_the_dequantized_model(folder: Path, quantizer: str, dtype: torch.dtype) -> None:
    ids = torch.arange(24).reshape(2, 12) % 16

    def gradients(trained: TrainableLM) -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for parameter in trained.parameters():
            # The second factor starts at zero, where the first has no gradient.
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        found = trained.policy.forward(ids).logits
        found.double().square().mean().backward()
        return found.detach(), [parameter.grad for parameter in trained.parameters() if parameter.grad is not None]

    small, exact = loaded(folder, quantizer, dtype), loaded(folder, None)
    unpacked(small.model, exact.model)
    trained = small.trainable(LORA, seed=0)
    logits, found = gradients(trained)
    with torch.no_grad():
        assert torch.equal(small.forward(ids).logits, logits), "rollouts and training call the same kernels"
    reference = exact.trainable(LORA, seed=0)
    assert reference.merged is not None
    reference.merged.remove()
    exact.model.double()
    expected, wanted = gradients(reference)
    assert len(found) == len(wanted) == 8
    for one, other in zip([logits, *found], [expected, *wanted], strict=True):
        assert (one.double() - other).norm() < (1e-5 if dtype == torch.float32 else 0.05) * other.norm()


@pytest.mark.parametrize("quantizer", STEPS)
def test_only_quantized_weights_are_kept_for_the_backward_pass(folder: Path, quantizer: str) -> None:
    trained, kept = loaded(folder, quantizer).trainable(LORA, seed=0), list[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(tuple(saved.shape)) or saved, lambda x: x):
        trained.policy.forward(torch.zeros(1, 12, dtype=torch.int64)).logits.sum().backward()
    shapes = {tuple(layer.weight.shape) for layer in linear(loaded(folder, None).model).values()} - {(16, 64)}
    assert kept
    assert not {*shapes, *(shape[::-1] for shape in shapes)} & {*kept}


@pytest.mark.parametrize("quantizer", STEPS)
def test_what_the_estimate_counts_is_held(folder: Path, quantizer: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        held, plain = loaded(folder, quantizer, dtype).model, loaded(folder, None, dtype).model
        rest = module_bytes(plain) - weight_bytes(plain, None, dtype.itemsize)
        assert module_bytes(held) == weight_bytes(plain, quantizer, dtype.itemsize) + rest
        largest = held.model.layers[0].mlp.down_proj.weight
        assert largest_layer(plain, quantizer) == largest.numel() or quantizer == "nf4"
        with PeakMemory() as memory:
            dequantized(largest, dtype)
        estimate = dequantizing_bytes(quantizer, 64 * 128, dtype.itemsize)
        assert 0.5 * estimate < memory.peak < 1.1 * estimate


def test_a_group_of_sixteen_levels_is_exact() -> None:
    weight = torch.arange(2 * GROUP).reshape(1, -1) % 16 * 0.5 - 3
    packed = PackedInt4.of(torch.cat([weight, weight * 4]))
    assert torch.equal(packed.dequantize(), torch.cat([weight, weight * 4]))
    assert packed.shape == (2, 2 * GROUP)
    assert packed.pairs[0, :3].tolist() == [0x01, 0x23, 0x45]
    assert packed.to(torch.device("cpu")).dequantize(torch.bfloat16).dtype == torch.bfloat16


def pipeline(made: type[PipelinePolicy], folder: Path, section: QuantizeSection | None) -> PipelinePolicy:
    settings = DiffusionSettings(height=64, width=64, quantize=section)
    policy = made.load(folder, settings, BOTH, {} if made is Flux3 else {"max_sequence_length": 8})
    return policy.computing_dequantized(section, BOTH)


@pytest.mark.parametrize(("made", "family"), [(SD3, "sd3"), (Flux3, "flux3")])
def test_denoisers_and_text_encoders_of_both_kinds_of_pipelines(
    tmp_path: Path, made: type[PipelinePolicy], family: str
) -> None:
    build_tiny(family).save_pretrained(tmp_path)
    policy, plain = pipeline(made, tmp_path, QuantizeSection(name="int8", text_encoders="float8")), None
    kinds = {
        name: {type(layer.weight).__name__ for layer in linear(module).values()}
        for name, module in policy.modules().items()
    }
    assert kinds["transformer"] == {"Int8Tensor"}
    assert "Float8Tensor" in kinds["text_encoder"]
    plain = pipeline(made, tmp_path, None)
    for name, module in plain.modules().items():
        unpacked(policy.modules()[name], module)
    rows = policy.encode(["4"])
    for name, expected in plain.encode(["4"]).items():
        torch.testing.assert_close(rows[name], expected)
    about = (policy.initial_latents([torch.Generator().manual_seed(0)]), torch.tensor([0.5]), Conditioning(rows, None))
    with torch.no_grad():
        assert torch.equal(policy.velocity(*about), plain.velocity(*about))


@pytest.mark.parametrize("quantizer", STEPS)
def test_weights_that_are_not_finite_are_refused(folder: Path, tmp_path: Path, quantizer: str) -> None:
    broken = AutoModelForCausalLM.from_pretrained(folder)
    broken.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    broken.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no finite numbers \('model.layers.1.mlp.up_proj.weight'\)"):
        loaded(tmp_path, quantizer)


def test_a_model_without_a_layer_to_quantize_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no layer of the LlamaForCausalLM was quantized.*needs a multiple of 64"):
        loaded(written(tmp_path, 24), "int4")


def test_a_quantizer_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowmill.models.weights.quantized.require_extra", lambda *names, label: None)
    check_quantizer("nf4", "transformers", "cpu")
    check_quantizer("nf4", "diffusers", "cuda")
    with pytest.raises(ConfigError, match=r"model.quantize is 'nf4'.*but the device is 'cpu'. Set it to 'int4'"):
        check_quantizer("nf4", "diffusers", "cpu")
    with pytest.raises(ConfigError, match=r"'float8', a type that 'mps' devices lack. Set it to 'int8'"):
        check_quantizer("float8", "transformers", "mps")
