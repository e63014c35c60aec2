"""The benchmarks: each module compares one thing with a peer or with the machine's own limit, in one run."""
