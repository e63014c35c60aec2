"""Continuous batching of a tiny model: requests come and go, prompts run in chunks, prefixes are reused."""

import torch

import pagoda
from pagoda.errors import CapacityError

LAYERS, HEADS, DIM, VOCABULARY = 2, 4, 16, 64
ROWS, BUDGET, LONGEST = 4, 24, 128  # requests at once, tokens per step, tokens of a request

torch.manual_seed(0)
embed, *weights = (torch.randn(n, HEADS * DIM) / 8 for n in (VOCABULARY, *[HEADS * DIM] * 4 * LAYERS))
embed = torch.nn.functional.normalize(embed)

layout = pagoda.Layout([pagoda.FullAttention(kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="float32")] * LAYERS)
capacity = layout.divide(layout.memory_for(2, LONGEST), LONGEST).capacity()  # room for two of the longest
manager = pagoda.Manager(layout, capacity, num_rows=ROWS, max_tokens=LONGEST)
pools = pagoda.Pools(
    layout, capacity, num_rows=ROWS, max_tokens=LONGEST, max_step_tokens=BUDGET, device="cpu"
)


def forward(tokens: torch.Tensor, batch: pagoda.Batch) -> torch.Tensor:
    """Logits behind the last token of each row: [rows, VOCABULARY]."""
    x = embed[tokens] + torch.sin(batch.positions[:, None] / 10)
    for n in range(LAYERS):
        q, k, v = (x @ weights[4 * n + i] for i in range(3))
        pools.layer(n).store(batch, k, v)
        out = pagoda.paged_attention(q.view(-1, HEADS, DIM), pools.layer(n), batch)
        x = x + torch.relu(out.flatten(1)) @ weights[4 * n + 3]
    return x[batch.query_start_loc[1:].long() - 1] @ embed.T


def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Each prompt with its greedy continuation."""
    texts, waiting = [list(prompt) for prompt in prompts], list(range(len(prompts)))[::-1]
    running: dict[int, int] = {}  # row → request
    while waiting or running:
        while waiting and manager.can_admit(texts[waiting[-1]]):
            request = waiting.pop()
            running[manager.admit(texts[request]).row] = request
        # Rows that have computed all their tokens but the newest decode, others are in their prompt.
        rows, counts, left = [], [], BUDGET
        for row, request in list(running.items()):
            try:
                manager.reserve(row, len(texts[request]) - manager.reserved(row))
            except CapacityError:  # what is committed stays cached: it is admitted again later
                manager.release(row)
                waiting.append(running.pop(row))
                continue
            count = min(left, len(texts[request]) - manager.computed(row))
            if count:
                rows, counts, left = [*rows, row], [*counts, count], left - count
        delta = manager.plan(rows, counts)
        pools.apply(delta)
        if rows:
            batch = pools.batch(delta)
            spans = [(running[r], n, c) for r, n, c in zip(rows, delta.lengths.tolist(), counts, strict=True)]
            step = [token for request, n, c in spans for token in texts[request][n - c : n]]
            chosen = forward(torch.tensor(step), batch).argmax(1).tolist()
            manager.commit(rows, step, counts)
            for row, (request, n, _), token in zip(rows, spans, chosen, strict=True):
                if n == len(texts[request]):  # the whole text is computed: this is its next token
                    texts[request].append(token)
                    if len(texts[request]) == len(prompts[request]) + num_new:
                        manager.release(row)
                        del running[row]
        manager.pass_fence(delta.step)  # a CPU is done when the call returns
    return texts


if __name__ == "__main__":
    system = [7 * i % VOCABULARY for i in range(40)]
    prompts = [[*system, i, i + 1, i + 2] for i in range(10)]
    for text in generate(prompts, 8)[:3]:
        print(text[40:43], "→", text[43:])
    print(f"{manager.stats().hit_tokens} of {manager.stats().admitted_tokens} tokens came from the cache")
    print(manager)
