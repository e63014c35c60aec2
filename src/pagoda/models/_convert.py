"""Converts GGUF to a Hugging Face folder. In: a GGUF file of a Llama with SmolLM2's tokenizer; out: config,
float32 weights and tokenizer, as transformers reads them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

__all__ = ["convert"]

# Names of a layer's tensors in GGUF and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of control tokens


def convert(gguf_path: Path, into: Path) -> None:
    """Write config, weights and tokenizer as transformers reads them. Takes some 5 s, most of it reading."""
    import gguf

    reader: Any = gguf.GGUFReader(gguf_path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    ends = {
        f"{role}_token_id": field(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=1e-5,  # GGUF has it rounded to float32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    config.save_pretrained(into)
    transformers.GenerationConfig(**ends).save_pretrained(into)
    _tokenizer(field, ends).save_pretrained(into)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights[_name(tensor.name)] = np.ascontiguousarray(_rotated(tensor.name, values, config))
    try:
        save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors has no error code for a full disk.
        raise OSError(errno.ENOSPC if "os error 28" in str(error) else errno.EIO, str(error)) from error


def _name(name: str) -> str:
    """Return transformers' name of a tensor."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{LAYER[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _rotated(name: str, values: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """Reorder the weights of queries and keys: transformers rotates the first half of a head with the second,
    GGUF rotates neighbours."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return values
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(field: Any, ends: dict[str, int]) -> Any:
    """Return the tokenizer: byte pairs, with single digits, as `tokenizer.ggml.pre` = smollm specifies."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    pairs = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pairs.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    pairs.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        bos_token=tokens[ends["bos_token_id"]],
        eos_token=tokens[ends["eos_token_id"]],
        pad_token=tokens[ends["pad_token_id"]],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=field("tokenizer.chat_template"),
    )
