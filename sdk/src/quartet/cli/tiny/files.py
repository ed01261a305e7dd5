"""Config, tokenizer and chat template of the small model, as the files of a Hugging Face model folder.

1. transformers loads the folder as Qwen3ForCausalLM and PreTrainedTokenizerFast; nothing here imports
   transformers.
2. Any text encodes and decodes to itself: the alphabet is the 256 bytes, without merges. Tags and fixed
   phrases of the example environments are added tokens, so that their prompts stay near 22 tokens.
3. `render` is what the chat template renders, without a template engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.cli.outputs import write_json, write_text

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
REVERSE_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
OPEN_TAG, CLOSE_TAG = "<reversed_text>", "</reversed_text>"
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    OPEN_TAG, CLOSE_TAG, "<answer>", "</answer>", "<guess>", "</guess>",
    "<alphabetical_sorted>", "</alphabetical_sorted>",
    "<combined_alphabetical_sorted>", "</combined_alphabetical_sorted>",
    "// new name!", '{"name": "python", "arguments": {"code": "', '"}}',
)  # fmt: skip
PHRASES = (
    "system", "user", "assistant", "tool",
    REVERSE_PROMPT,
    "Sort these names in alphabetical order by FIRST name: ",
    "Now sort ALL of these names alphabetically by FIRST name: ",
    "Use exactly this format:", "Name1", "Name2", "Name3",
    "Use the python tool.", "Guess the number.", "higher", "lower", "correct",
)  # fmt: skip
VOCAB_MULTIPLE = 32  # rows of the embedding are padded to whole vector registers
MAX_POSITIONS = 2048

# Tools are not listed: a model of this size knows its tools from its demonstrations, and the list would be
# longer than everything else.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\\n' + (m['content'] or '')}}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{'<tool_call>' + call['function'] | tojson + '</tool_call>'}}{% endfor %}"
    "{{'<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)

# A message as chat templates take it: role, content, and the tool calls of an assistant.
Message = Mapping[str, Any]


def content_of(message: Message) -> str:
    """What stands between a message's role and its end."""
    calls = [
        f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return "".join([message["content"] or "", *calls])


def render(messages: Sequence[Message]) -> str:
    """The conversation as the chat template writes it, up to where the assistant begins."""
    turns = "".join(f"{IM_START}{m['role']}\n{content_of(m)}{IM_END}\n" for m in messages)
    return f"{turns}{IM_START}assistant\n"


def build_tokenizer(phrases: Sequence[str] = ()) -> Any:
    """The tokenizer, as a `tokenizers.Tokenizer`; each of the phrases becomes one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    added = dict.fromkeys([*TAGS, *PHRASES, *phrases])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def model_config(tokenizer: Any) -> dict[str, object]:
    """config.json: 0.63 million parameters."""
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": -(-vocabulary // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 3,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "dtype": "float32",
    }


def write_model_files(folder: Path, phrases: Sequence[str] = ()) -> None:
    """Everything of the model but its weights."""
    tokenizer = build_tokenizer(phrases)
    folder.mkdir(parents=True, exist_ok=True)
    # Not by its own save(), which says of a full disk that it is some Exception.
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = model_config(tokenizer)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")} | {"do_sample": True}
    special = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("special_tokens_map.json", special),
        ("generation_config.json", generation),
    ):
        write_json(folder / name, content)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)
