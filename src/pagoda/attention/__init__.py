"""What attention reads. In: tables of groups, rows, lengths; out: what a back end wants, or attention.

`PagedView` holds the metadata of one group in buffers that never move, `PagedViews` fills those of several
groups at once; `nhd_pages` and `hnd_pages` show
a pool's buffer in pages; `paged_attention` is attention through a view in plain torch. Invariant 6.
"""

from pagoda.attention._paged import paged_attention
from pagoda.attention._pages import hnd_pages, nhd_pages
from pagoda.attention._view import PagedView, PagedViews

__all__ = ["PagedView", "PagedViews", "hnd_pages", "nhd_pages", "paged_attention"]
