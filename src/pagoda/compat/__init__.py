"""The names of public designs, one thin file each, over the parts of the house.

Nothing inside the house imports this; `pagoda` re-exports all of it.
"""

from pagoda.compat.blocks import BlockAllocator
from pagoda.compat.pools import (
    GDNPool,
    KVPool,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    make_full_attention_net_mem_pool,
    make_req_to_token_pool,
)
from pagoda.compat.slots import SlotAllocator

__all__ = [
    "BlockAllocator",
    "GDNPool",
    "KVPool",
    "ReqToTokenPool",
    "SlotAllocator",
    "TokenToKVPoolAllocator",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
]
