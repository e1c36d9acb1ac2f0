"""The tokenizer that the rest of the package sees, and how to make one from a model's files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from llama_jax.errors import FormatError, reason, shown
from llama_jax.text.vocabulary import TokenType, make_vocabulary, raw_text

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      vocab_size: number of ids; a model may have more rows (padding), which no text ever uses.
      bos_id, eos_id: ids that begin and end a text, None where the vocabulary has none.
      eog_ids: every id that ends a generation, sorted: end of text, of turn, of message, and padding.
      add_bos, add_eos: whether the file wants them added to a text.
      add_space_prefix: whether a text is encoded as if a space stood before it.
      chat_template: Jinja source, None where the file has none.
      special_tokens: text to id of the control tokens, which only `parse_special` turns into ids.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None
    special_tokens: Mapping[str, int]

    def encode(
        self,
        text: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        parse_special: bool = False,
        literals: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`, the same as llama.cpp's.

        Args:
          text: any string; lone surrogates become U+FFFD.
          add_bos, add_eos: whether BOS comes first and EOS last; None does what the file says.
          parse_special: control tokens in the text become their ids; else `<s>` in a text is three characters.
            User-defined tokens always become their ids.
          literals: single characters that stand for texts in which no special token is seen.

        Raises:
          ArgumentError: `add_bos` or `add_eos` is True and the vocabulary has no such token.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: control tokens print nothing, bytes that are not UTF-8 become U+FFFD.

        The space that encoding put before the text is taken away again.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to a text; b"" for a control token. Raises ArgumentError for an unknown id."""
        ...

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it. Raises ArgumentError for an unknown id."""
        ...

    def score(self, token_id: int) -> float:
        """What SentencePiece orders merges by, 0 without scores. Raises ArgumentError for an unknown id."""
        ...

    def token_type(self, token_id: int) -> TokenType:
        """The kind of the token. Raises ArgumentError for an unknown id."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token. Raises ArgumentError for an unknown id."""
        ...


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the `tokenizer.*` keys of a GGUF file describe.

    Args:
      metadata: key to value; arrays are lists or numpy arrays, strings that are not UTF-8 may be `bytes`. A vocabulary
        of a file older than GGUF fits too: `llama` tokens and scores without types, byte tokens as raw bytes and plain
        spaces for `▁`.

    Raises:
      FormatError: a key is missing, sizes disagree, an id lies outside of the vocabulary, or the model or pre-tokenizer
        is unknown.

    Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    model = metadata.get("tokenizer.ggml.model")
    if isinstance(model, str) and model == "llama":
        return _sentencepiece_from_gguf(metadata)
    if isinstance(model, str) and model == "gpt2":
        return _bpe_from_gguf(metadata)
    raise FormatError(f"tokenizer.ggml.model is {shown(model)}; allowed are 'llama' and 'gpt2'.")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json` if there is one, else `tokenizer.model`.

    `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `generation_config.json` and
    `chat_template.jinja` add what they know.

    Raises:
      FormatError: there is no tokenizer, or a file is damaged.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file():
        return _json_from_folder(folder)
    if (folder / "tokenizer.model").is_file():
        return _sentencepiece_from_folder(folder)
    raise FormatError(f"{folder} holds no tokenizer; tokenizer.json or tokenizer.model is needed.")


# GGUF


def _sentencepiece_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    from llama_jax.text.sentencepiece import SentencePieceTokenizer, build_processor

    texts = _texts(metadata, "tokenizer.ggml.tokens")
    scores = [float(x) for x in _numbers(metadata, "tokenizer.ggml.scores", (int, float))]
    if len(scores) != len(texts):
        raise FormatError(f"The vocabulary has {len(texts)} tokens but {len(scores)} scores; the two must agree.")
    bad = next((i for i, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        raise FormatError(f"Token {bad} has the score {scores[bad]}; only finite numbers are allowed.")
    bos, eos, unknown = (_token_id(metadata, name, i) for name, i in (("bos", 1), ("eos", 2), ("unknown", 0)))
    if "tokenizer.ggml.token_type" in metadata:
        types = [int(x) for x in _numbers(metadata, "tokenizer.ggml.token_type", int)]
    else:
        texts, types = _legacy_tables(texts, controls=(bos, eos), unknown=unknown)
    vocabulary = make_vocabulary(
        texts,
        types,
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        end_ids=_end_ids(metadata),
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token", True),
        add_eos=_flag(metadata, "tokenizer.ggml.add_eos_token", False),
        add_space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", True),
        chat_template=_chat_template(metadata),
    )
    return SentencePieceTokenizer(vocabulary, build_processor(vocabulary, scores))


def _bpe_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    from llama_jax.text.bpe import PRE_TOKENIZERS, ByteLevelTokenizer

    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning("tokenizer.ggml.pre is missing: words are cut by the default rule, ids may be slightly off")
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise FormatError(f"tokenizer.ggml.pre is {shown(name)}; allowed are {', '.join(map(repr, PRE_TOKENIZERS))}.")
    pre_tokenizer = PRE_TOKENIZERS[name]
    texts = _texts(metadata, "tokenizer.ggml.tokens")
    types = [int(TokenType.NORMAL)] * len(texts)
    if "tokenizer.ggml.token_type" in metadata:
        types = [int(x) for x in _numbers(metadata, "tokenizer.ggml.token_type", int)]
    bos, eos, unknown = (_token_id(metadata, key, None) for key in ("bos", "eos", "unknown"))
    vocabulary = make_vocabulary(
        texts,
        types,
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        end_ids=_end_ids(metadata),
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token", pre_tokenizer.add_bos and bos is not None),
        add_eos=_flag(metadata, "tokenizer.ggml.add_eos_token", False),
        chat_template=_chat_template(metadata),
    )
    return ByteLevelTokenizer(vocabulary, _texts(metadata, "tokenizer.ggml.merges"), pre_tokenizer)


def _legacy_tables(
    texts: Sequence[str], *, controls: Iterable[int | None], unknown: int | None
) -> tuple[list[str], list[int]]:
    """Tables of a vocabulary without types: ids 3 to 258 are bytes where they hold the raw bytes in order."""
    texts = list(texts)
    types = [int(TokenType.NORMAL)] * len(texts)
    for i in controls:
        if i is not None and i < len(texts):
            types[i] = int(TokenType.CONTROL)
    if unknown is not None and unknown < len(texts):
        types[unknown] = int(TokenType.UNKNOWN)
    forms = ((f"<0x{b:02X}>", raw_text(bytes([b]))) for b in range(256))
    if len(texts) > 258 and all(texts[3 + b] in form for b, form in enumerate(forms)):
        texts[3:259] = [f"<0x{b:02X}>" for b in range(256)]
        types[3:259] = [int(TokenType.BYTE)] * 256
    return [text.replace(" ", "▁") if types[i] == TokenType.NORMAL else text for i, text in enumerate(texts)], types


def _array(metadata: Mapping[str, object], key: str) -> Sequence[Any]:
    value = metadata.get(key)
    if value is None:
        raise FormatError(f"{key} is missing; this vocabulary needs it.")
    if hasattr(value, "tolist"):
        value = value.tolist()  # type: ignore[attr-defined]
    if not isinstance(value, (list, tuple)):
        raise FormatError(f"{key} is {type(value).__name__}; an array is needed.")
    return value


def _numbers(metadata: Mapping[str, object], key: str, kinds: type | tuple[type, ...]) -> Sequence[Any]:
    values = _array(metadata, key)
    bad = next((v for v in values if not isinstance(v, kinds)), None)
    if bad is not None:
        raise FormatError(f"{key} holds {shown(bad)}; only numbers are allowed, for types only integers.")
    return values


def _texts(metadata: Mapping[str, object], key: str) -> list[str]:
    values = _array(metadata, key)
    bad = next((v for v in values if not isinstance(v, (str, bytes))), None)
    if bad is not None:
        raise FormatError(f"{key} holds {shown(bad)}; only strings are allowed.")
    return [raw_text(value) for value in values]


def _token_id(metadata: Mapping[str, object], name: str, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return default
    value = metadata[key]
    if not isinstance(value, Integral):
        raise FormatError(f"{key} is {shown(value)}; an integer is needed.")
    return int(value)


def _end_ids(metadata: Mapping[str, object]) -> list[int]:
    ids = (_token_id(metadata, name, None) for name in ("eot", "eom"))
    return [i for i in ids if i is not None]


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if getattr(value, "ndim", 0) or isinstance(value, (str, bytes, list)):
        raise FormatError(f"{key} is {shown(value)}; true or false is needed.")
    return bool(value)


def _chat_template(metadata: Mapping[str, object]) -> str | None:
    value = metadata.get("tokenizer.chat_template")
    return value if isinstance(value, str) and value else None


# Hugging Face folders


def _json_from_folder(folder: Path) -> Tokenizer:
    from llama_jax.text.bpe import JsonTokenizer, json_tables, load_json

    library = load_json(folder / "tokenizer.json")
    texts, types = json_tables(library)
    config, special = _folder_config(folder)
    id_of = {text: i for i, text in enumerate(texts)}
    # What the file adds to an empty text says which ids it wants around every text.
    around = library.encode("").ids
    bos = id_of.get(special.get("bos_token", ""), around[0] if around else None)
    eos = id_of.get(special.get("eos_token", ""))
    vocabulary = make_vocabulary(
        texts,
        types,
        bos_id=bos,
        eos_id=eos,
        unknown_id=id_of.get(special.get("unk_token", "")),
        end_ids=_generation_ends(folder),
        add_bos=_rule(config, "add_bos_token", bos is not None and around[:1] == [bos]),
        add_eos=_rule(config, "add_eos_token", eos is not None and around[-1:] == [eos] and around != [bos]),
        chat_template=_folder_template(folder, config),
    )
    return JsonTokenizer(vocabulary, library)


def _sentencepiece_from_folder(folder: Path) -> Tokenizer:
    from llama_jax.text.sentencepiece import SentencePieceTokenizer, load_processor, read_model

    path = folder / "tokenizer.model"
    model, texts, types, add_space_prefix = read_model(path)
    processor = load_processor(model, str(path))
    config, special = _folder_config(folder)
    _add_tokens(texts, types, _added_tokens(folder, config))
    id_of = {text: i for i, text in enumerate(texts)}
    bos, eos, unknown = (
        id_of.get(special.get(name, ""), default if default >= 0 else None)
        for name, default in (
            ("bos_token", processor.bos_id()),
            ("eos_token", processor.eos_id()),
            ("unk_token", processor.unk_id()),
        )
    )
    vocabulary = make_vocabulary(
        texts,
        types,
        bos_id=bos,
        eos_id=eos,
        unknown_id=unknown,
        end_ids=_generation_ends(folder),
        add_bos=_rule(config, "add_bos_token", bos is not None),
        add_eos=_rule(config, "add_eos_token", False),
        add_space_prefix=add_space_prefix,
        chat_template=_folder_template(folder, config),
    )
    return SentencePieceTokenizer(vocabulary, processor)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {reason(error)}.") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds {type(value).__name__}; a JSON object is needed.")
    return value


def _folder_config(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(tokenizer_config.json, texts of the special tokens by name)."""
    config = _read_json(folder / "tokenizer_config.json")
    special: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in ("bos_token", "eos_token", "unk_token"):
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
    return config, special


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, tuple[str, TokenType]]:
    """Tokens beyond the SentencePiece model: id to (text, type)."""
    added = {
        i: (text, TokenType.USER_DEFINED)
        for text, i in _read_json(folder / "added_tokens.json").items()
        if isinstance(i, int)
    }
    decoder = config.get("added_tokens_decoder", {})
    try:
        for key, token in decoder.items():
            kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            added[int(key)] = (str(token["content"]), kind)
    except (AttributeError, KeyError, ValueError) as error:
        raise FormatError(
            f"added_tokens_decoder in {folder / 'tokenizer_config.json'} is damaged: {reason(error)}."
        ) from error
    return added


def _add_tokens(texts: list[str], types: list[int], added: Mapping[int, tuple[str, TokenType]]) -> None:
    """Append tokens in place; ids between them become unused `[PADn]`."""
    base = len(texts)
    size = max((*added, base - 1)) + 1
    if size > 2 * base + 65536:
        raise FormatError(
            f"An added token has the id {size - 1}; that is too far beyond the {base} pieces of the model."
        )
    texts += [f"[PAD{i}]" for i in range(base, size)]
    types += [int(TokenType.UNUSED)] * (size - base)
    for i, (text, kind) in added.items():
        if i >= base:
            texts[i], types[i] = text, int(kind)


def _generation_ends(folder: Path) -> list[int]:
    value = _read_json(folder / "generation_config.json").get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _rule(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    return value if isinstance(value, bool) else default


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, else the template in tokenizer_config.json (of several, the one named "default")."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) and value else None
