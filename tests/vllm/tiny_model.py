"""Makes a small Llama out of nothing: random weights, and a tokenizer trained on Python's own library.

    .venv-vllm/bin/python tests/vllm/tiny_model.py FOLDER

Seconds, 20 MB, no download, and the same bytes at every run. What it says is noise, which is what the tests
want: noise spells half characters, words of every alphabet and special tokens, and no two prompts alike.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CONTEXT = 4096, 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# As in Qwen's and Hermes' vocabularies: turns and the end are special, what a parser reads is ordinary text.
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
SPOKEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Emoji and other alphabets are learnt only in part, so most of their characters span tokens.
OTHER_ALPHABETS = (
    "naïve café über Straße 日本語 漢字 русский язык العربية हिन्दी 😀 👩‍🚀 → ≠ ∑ … “quoted” 한국어 ελληνικά\n"
)
_TRAINING_BYTES = 2_000_000


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(SPOKEN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in SPOKEN])
    return tokenizer


def _texts() -> Iterator[str]:
    left = _TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        yield text
        left -= len(text)
        if left < 0:
            break
    yield OTHER_ALPHABETS * 40


def make(folder: Path) -> None:
    tokenizer = train_tokenizer()
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    ).save_pretrained(folder)
    torch.manual_seed(7)
    random.seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            # Wide: small random weights would make all words nearly equal, and greedy one long repetition.
            initializer_range=0.2,
            bos_token_id=end,
            eos_token_id=turn_end,
            pad_token_id=end,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )
    model.save_pretrained(folder)
    made = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print(json.dumps(made))  # noqa: T201


if __name__ == "__main__":
    make(Path(sys.argv[1]))
