"""Pages of the docs that are rendered from what they describe: ``python -m pages.config_page`` writes one anew."""
