"""The parts of a model that are loaded apart from each other."""

from enum import Enum


class Part(Enum):
    """A part of a model; encoders and decoders are large and needed by few stages."""

    TEXT = "text"
    DENOISER = "denoiser"
    VAE = "vae"
    CRITIC = "critic"
    RENDERER = "renderer"
