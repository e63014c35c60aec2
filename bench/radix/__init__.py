"""Prefix trees of SGLang and Pagoda: one workload, one process each, answers compared."""
