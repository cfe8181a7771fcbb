"""Diffusion and flow-matching policies: samples are denoised, transitions or noised samples are trained on."""
