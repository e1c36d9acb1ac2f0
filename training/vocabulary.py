"""The vocabulary of a training run: taken from a model or made from the data, as the keys that a GGUF file holds."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llama_jax import checks
from llama_jax.errors import ArgumentError, plain

UNKNOWN, BOS, EOS = 0, 1, 2
# Behind a sentencepiece model: normalizer_spec { add_dummy_prefix: true }, which overrides what stands before it.
_SPACE_PREFIX = b"\x1a\x02\x18\x01"
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip


def train_vocabulary(texts: Iterable[str], size: int) -> tuple[dict[str, Any], bytes]:
    """A BPE vocabulary of pieces within a line, with byte tokens, made by sentencepiece.

    A newline becomes its byte, <0x0A>, as in every `llama` vocabulary. Text begins with a space for the tokenizer
    (add_space_prefix), lines do not: so pieces are learnt from lines as they are.

    Returns:
      metadata: the keys `tokenizer.*` of a GGUF file.
      model: the contents of a `tokenizer.model` file.

    Raises:
      ArgumentError: the texts are too short for so many pieces.
    """
    import sentencepiece

    checks.integer("The vocabulary's size", size, 262)
    model = io.BytesIO()
    lines = (line[at : at + 4096] for text in texts for line in text.splitlines() for at in range(0, len(line), 4096))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, model_type="bpe", vocab_size=size, byte_fallback=True,
            character_coverage=1.0, split_digits=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, unk_id=UNKNOWN, bos_id=BOS, eos_id=EOS, pad_id=-1, num_threads=1,
            minloglevel=2, max_sentence_length=1 << 16,
        )  # fmt: skip
    except RuntimeError as error:
        raise ArgumentError(f"A vocabulary of {size} pieces cannot be made of this text: {plain(error, 200)}") from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())

    def token_type(i: int) -> int:  # GGUF's numbers: unknown, control, byte, normal
        return 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(processor.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [token_type(i) for i in ids],
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
    return metadata, model.getvalue() + _SPACE_PREFIX


@dataclasses.dataclass(frozen=True, slots=True)
class VocabularySource:
    """A tokenizer with what is needed to write it beside a new model.

    Attributes:
      tokenizer: text to ids.
      metadata: the keys `tokenizer.*` of a GGUF file; empty where it came from a Hugging Face folder.
      folder: the Hugging Face folder it came from, if it did.
      model: the contents of a `tokenizer.model` file, if it was made here.
    """

    tokenizer: Any
    metadata: Mapping[str, Any]
    folder: Path | None = None
    model: bytes | None = None

    def save(self, folder: Path) -> bool:
        """Puts the tokenizer's files into a Hugging Face folder; False where there are none to put."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model is not None:
            (folder / "tokenizer.model").write_bytes(self.model)
            config = dict(
                tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                add_bos_token=True, add_eos_token=False, add_prefix_space=True, legacy=False,
            )  # fmt: skip
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            return True
        if self.folder is None:
            return False
        for path in (self.folder / name for name in _FILES):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        return True


def vocabulary_of(path: str | Path | None) -> VocabularySource:
    """The vocabulary of a GGUF file, a Hugging Face folder or a hub path; None is the shipped model."""
    from llama_jax.formats.hub import resolve_path
    from llama_jax.formats.load import open_model
    from llama_jax.llama import shipped_model
    from llama_jax.text.tokenizer import tokenizer_from_folder

    resolved = shipped_model() if path is None else Path(resolve_path(path))
    if resolved.is_dir():
        return VocabularySource(tokenizer_from_folder(resolved), {}, resolved)
    with open_model(resolved) as file:
        metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        return VocabularySource(file.tokenizer(), metadata)


def vocabulary_from_texts(texts: Iterable[str], size: int) -> VocabularySource:
    """A vocabulary made of the training data."""
    from llama_jax.text.tokenizer import tokenizer_from_gguf

    metadata, model = train_vocabulary(texts, size)
    return VocabularySource(tokenizer_from_gguf(metadata), metadata, model=model)
