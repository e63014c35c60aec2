"""Attention over the pages of a pool. In: queries, a layer, a batch; out: outputs.

`paged_attention` is a reference in plain torch; `nhd_pages` and `hnd_pages` view a pool's buffer by page, as
back ends take it.
"""

from pagoda.attention._paged import paged_attention
from pagoda.attention._pages import hnd_pages, nhd_pages

__all__ = ["hnd_pages", "nhd_pages", "paged_attention"]
