"""The prefix trees of SGLang beside ours: one workload, one process each, answers compared."""
