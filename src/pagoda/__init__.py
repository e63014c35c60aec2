"""Pagoda: the KV-cache memory of an LLM inference engine, as a library."""
