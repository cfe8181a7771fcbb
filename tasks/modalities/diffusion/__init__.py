"""Diffusion and flow-matching policies: sampling is denoising, training uses transitions or noised samples."""
