"""A Hugging Face `tokenizer.json` made from the vocabulary inside a GGUF file.

It turns ids into text exactly as llama.cpp does, which is all that the gateway needs to continue an
answer on another node. It does not turn text into ids: GGUF has scores where the format wants merges,
so the model part is a plain word list that refuses to guess. Encoding stays with the engine.

    python -m kernel_steer.node.tokenizer_export --model PATH    prints the path of the tokenizer
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kernel_steer.node.models import ModelUnavailable, ensure_demo_model, make_once

# llama_token_type of llama.cpp.
_UNKNOWN, _CONTROL = 2, 3
# llama.cpp treats a word that ends a turn as a control token even where the file forgot to say so.
_END_WORDS = {
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<EOT>",
}


def ensure_tokenizer(model: Path) -> Path:
    """The tokenizer of a GGUF model, kept next to it. Raises ModelUnavailable for other vocabularies."""
    return make_once(model.with_suffix(".tokenizer.json"), lambda draft: _export(model, draft))


def _export(model: Path, draft: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import WordLevel

    words, types = _read_vocabulary(model)
    unknown = next((word for word, kind in zip(words, types, strict=True) if kind == _UNKNOWN), "<unk>")
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(word, special=True, normalized=False)
            for word, kind in zip(words, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL) or word in _END_WORDS
        ]
    )
    tokenizer.save(str(draft), pretty=False)


def _read_vocabulary(model: Path) -> tuple[list[str], list[int]]:
    from gguf import GGUFReader

    fields = GGUFReader(model).fields
    kind = fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else "none"
    if kind != "llama":
        raise ModelUnavailable(
            f"{model.name} has a vocabulary of kind {kind!r}, only SentencePiece ('llama') can be exported: "
            "give the tokenizer.json of the model instead"
        )
    if (
        fields["tokenizer.ggml.add_space_prefix"].contents()
        if "tokenizer.ggml.add_space_prefix" in fields
        else True
    ):
        raise ModelUnavailable(
            f"{model.name} hides a space before the first word: give the tokenizer.json of the model instead"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    words = [bytes(tokens.parts[index]).decode() for index in tokens.data]
    types = fields["tokenizer.ggml.token_type"]
    return words, [int(types.parts[index][0]) for index in types.data]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernel_steer.node.tokenizer_export")
    parser.add_argument("--model", type=Path, help="GGUF file; without it the demo model")
    arguments = parser.parse_args()
    try:
        print(ensure_tokenizer(arguments.model or ensure_demo_model()))  # noqa: T201
    except ModelUnavailable as error:
        sys.exit(f"apex: {error}")


if __name__ == "__main__":
    main()
