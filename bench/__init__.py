"""The figures: each module measures one thing beside a peer or the machine's own limit, in one run."""
