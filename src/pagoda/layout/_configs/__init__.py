"""Hugging Face configs. In: a config, or the name of a well-known model; out: its Layout."""
