"""Generated pages of the docs: ``python -m pages.config_page`` writes one."""
