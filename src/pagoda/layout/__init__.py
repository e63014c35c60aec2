"""What a model stores. In: a model's config; out: groups of layers and all sizes that Pagoda uses.

`_kinds` describes single layers, `_entries` the bytes of one token in one tensor, `_groups` the layers that
share ids, `_layout` the whole model, and `_sizing` divides memory between groups, and
`_work` attention among the programs of a device. `_configs/` reads Hugging
Face configs; `models/` contains those of well-known models. Does not import torch."""

from pagoda.layout._configs.reading import from_hf, model_config, model_names
from pagoda.layout._entries import (
    Entry,
    TensorSpec,
    compressed_fp8,
    index_keys,
    latent,
    latent_fp8,
    plain,
)
from pagoda.layout._groups import PagedGroup, StateGroup
from pagoda.layout._kinds import (
    CompressedAttention,
    FullAttention,
    GatedDelta,
    KimiDelta,
    Kind,
    LatentAttention,
    Lightning,
    Mamba1,
    Mamba2,
    RingWindow,
    SharedAttention,
    ShortConv,
    Storage,
    WindowAttention,
)
from pagoda.layout._layout import Layout, Need
from pagoda.layout._sizing import Budget, Share

__all__ = [
    "Budget",
    "CompressedAttention",
    "Entry",
    "FullAttention",
    "GatedDelta",
    "KimiDelta",
    "Kind",
    "LatentAttention",
    "Layout",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "Need",
    "PagedGroup",
    "RingWindow",
    "Share",
    "SharedAttention",
    "ShortConv",
    "StateGroup",
    "Storage",
    "TensorSpec",
    "WindowAttention",
    "compressed_fp8",
    "from_hf",
    "index_keys",
    "latent",
    "latent_fp8",
    "model_config",
    "model_names",
    "plain",
]
