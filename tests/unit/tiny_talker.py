"""A tiny model that talks: random weights, a tokenizer of bytes, a chat template. Nothing is downloaded.

In: sizes; out: a model with its tokenizer, a Hugging Face folder, or a wheel with the model as GGUF."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

__all__ = ["CHAT", "CONTROL", "save", "tiny_model", "tiny_tokenizer", "write_gguf", "write_wheel"]

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
MERGES = [("Ġ", "Ġ"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he")]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(context: int = 512) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        initializer_range=0.3,  # so that answers are not one token over and over
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> Any:
    pairs = Tokenizer(BPE({token: id for id, token in enumerate(TOKENS)}, MERGES))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    pairs.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs, eos_token=CONTROL[2], pad_token=CONTROL[2], chat_template=CHAT
    )


def save(folder: Path, context: int = 512) -> Path:
    """A Hugging Face folder."""
    tiny_model(context).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path: Path, model: Any) -> None:
    """As llama.cpp's converter does it: queries and keys of a head with halves interleaved; one matrix of
    each layer in 4 bits, one in 8."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "context_length": config.max_position_embeddings,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    for name, value in {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.add_chat_template(CHAT)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            _add(writer, name, tensor.numpy(), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: Any) -> None:
    if name == "model.embed_tokens.weight":
        writer.add_tensor("token_embd.weight", values)
        return
    if name == "model.norm.weight":
        writer.add_tensor("output_norm.weight", values)
        return
    _, _, layer, *part, _ = name.split(".")
    called = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }[part[-1]]
    kind = {
        "ffn_gate": gguf.GGMLQuantizationType.Q4_1,
        "ffn_up": gguf.GGMLQuantizationType.Q8_0,
    }.get(called)
    full = f"blk.{layer}.{called}.weight"
    if called in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if called == "attn_q" else config.num_key_value_heads
        # Row i of the first half of a head, then row i of its second half, then row i + 1 of both.
        half = values.shape[0] // heads // 2
        order = [h * 2 * half + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)]
        values = values[order]
    if kind is None:
        writer.add_tensor(full, values)
    else:
        writer.add_tensor(full, gguf.quantize(values, kind), raw_dtype=kind)


def write_wheel(path: Path, member: str, model: Any) -> str:
    """A wheel with the model in it; its SHA-256."""
    grown = path.with_suffix(".gguf")
    write_gguf(grown, model)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(grown, member)
    grown.unlink()
    return hashlib.sha256(path.read_bytes()).hexdigest()
