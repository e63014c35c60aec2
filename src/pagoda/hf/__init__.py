"""A prefix cache for Hugging Face models, in one line. In: a model; out: the same model with a cache.

    cache = pagoda.hf.enable(model, memory="4GiB")
    model.generate(**inputs)  # as before
    print(cache.stats())

Needs transformers: pip install 'pagoda-kv[hf]'. docs/hf.md says which models and calls are served.
"""

from pagoda.errors import ConfigError as _ConfigError

try:
    import transformers as _transformers
except ModuleNotFoundError as _missing:
    raise _ConfigError("pagoda.hf needs transformers: pip install 'pagoda-kv[hf]'") from _missing

from pagoda.hf._cache import Call, PrefixCache, Stats, cached, disable, enable

__all__ = ["Call", "PrefixCache", "Stats", "cached", "disable", "enable"]

del _transformers
