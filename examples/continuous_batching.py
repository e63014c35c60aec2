"""Continuous batching of a tiny model: requests come and go, prompts run in chunks, prefixes are reused."""

import torch

from pagoda import Batch, CapacityError, FullAttention, Layout, Manager, Pools, attention

LAYERS, HEADS, DIM, VOCABULARY = 2, 4, 16, 64
ROWS, BUDGET, LONGEST = 4, 24, 128  # requests at once, tokens per step, tokens of a request

torch.manual_seed(0)
embed, unembed = torch.randn(2, VOCABULARY, HEADS * DIM)
weights = torch.randn(LAYERS, 4, HEADS * DIM, HEADS * DIM) / 4  # query, key, value, output
layout = Layout([FullAttention(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float32")] * LAYERS)


def memory(num_pages: int) -> tuple[Manager, Pools]:
    """The manager plans; the pools carry out, on one rank."""
    sizes = {"capacity": {"full": num_pages}, "num_rows": ROWS, "max_tokens": LONGEST}
    manager = Manager(layout, **sizes)
    return manager, Pools(layout, **sizes, max_step_tokens=BUDGET, device="cpu")


def forward(tokens: torch.Tensor, pools: Pools, batch: Batch) -> torch.Tensor:
    """Logits behind the last token of each row: [rows, VOCABULARY]."""
    x = embed[tokens] + torch.sin(batch.positions[:, None] / torch.arange(1, HEADS * DIM + 1))
    for n in range(LAYERS):
        q, k, v = (x @ weights[n, i] for i in range(3))
        pools.layer(n).store(batch, k, v)
        out = attention.paged(q.view(-1, HEADS, DIM), pools.layer(n), batch)
        x = x + out.flatten(1) @ weights[n, 3]
    return x[batch.query_start_loc[1:].long() - 1] @ unembed.T


def generate(prompts: list[list[int]], num_new: int, manager: Manager, pools: Pools) -> list[list[int]]:
    """Each prompt with its greedy continuation."""
    texts, waiting = [list(prompt) for prompt in prompts], list(range(len(prompts)))[::-1]
    running: dict[int, int] = {}  # row → request
    while waiting or running:
        while waiting:
            text = texts[waiting[-1]]  # it waits while a running row computes what it could hit
            if running and (not manager.can_admit(text) or manager.pending(text)):
                break
            running[manager.admit(text).row] = waiting.pop()  # alone and still too long: CapacityError
        rows, counts, left = [], [], BUDGET
        for row, request in list(running.items()):
            try:
                manager.reserve(row, len(texts[request]) - manager.reserved(row))
            except CapacityError:  # preempted: its tokens stay cached, it is admitted again later
                manager.release(row)
                waiting.append(running.pop(row))
                continue
            if count := min(left, len(texts[request]) - manager.computed(row)):
                rows, counts, left = [*rows, row], [*counts, count], left - count
        if not rows:
            continue
        delta = manager.plan(rows, counts)
        pools.apply(delta)
        spans = list(zip((running[row] for row in rows), delta.lengths.tolist(), counts, strict=True))
        step = [token for request, end, count in spans for token in texts[request][end - count : end]]
        chosen = forward(torch.tensor(step), pools, pools.batch(delta)).argmax(1).tolist()
        manager.commit(rows, step, counts)
        for row, (request, end, _), token in zip(rows, spans, chosen, strict=True):
            if end == len(texts[request]):  # all of it is computed: this is its next token
                texts[request].append(token)
                if len(texts[request]) == len(prompts[request]) + num_new:
                    manager.release(row)
                    del running[row]
        manager.pass_fence(delta.step)  # a CPU has computed the step when the calls return
    return texts


if __name__ == "__main__":
    manager, pools = memory(num_pages=16)
    system = [7 * i % VOCABULARY for i in range(40)]
    for text in generate([[*system, i, i + 1, i + 2] for i in range(10)], 8, manager, pools):
        print(text[40:43], "→", text[43:])
    stats = manager.stats()
    print(f"{stats.hit_tokens} of {stats.admitted_tokens} prompt tokens came from the cache")
