"""Attention over the pages of a pool. In: queries, a layer, a batch; out: outputs.

`paged` computes it; `nhd_pages` and `hnd_pages` view a pool's buffer by page, as
back ends take it.
"""

from pagoda.attention._paged import paged
from pagoda.attention._pages import hnd_pages, nhd_pages

__all__ = ["hnd_pages", "nhd_pages", "paged"]
