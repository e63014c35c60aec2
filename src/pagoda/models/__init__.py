"""A small model to try things with. In: a name or a folder; out: a Hugging Face model with its tokenizer.

    model, tokenizer = pagoda.models.load()

`load` loads "smollm2" or any Hugging Face folder; `smollm2` downloads and converts that model once, into
`cache_folder()`. Needs transformers: pip install 'pagoda-kv[hf]'.
"""

from pagoda.errors import ConfigError as _ConfigError

try:
    import transformers as _transformers
except ModuleNotFoundError as _missing:
    raise _ConfigError("pagoda.models needs transformers: pip install 'pagoda-kv[hf]'") from _missing

from pagoda.models._load import load
from pagoda.models._smollm2 import cache_folder, smollm2

__all__ = ["cache_folder", "load", "smollm2"]

del _transformers
