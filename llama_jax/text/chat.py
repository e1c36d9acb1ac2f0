"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, UndefinedError

from llama_jax.errors import ArgumentError, FormatError, reason, shown
from llama_jax.text.sandbox import MAX_TEXT, Sandbox, TemplateRefusedError, start_budget
from llama_jax.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of models that have none."""


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    **extra: Any,
) -> str:
    """The text of a conversation.

    Args:
      template: Jinja source as in `tokenizer.chat_template`; None means ChatML.
      messages: mappings with "role" and "content": a string, None, or parts {"type": "text", "text": ...}, which are
        joined by newlines. Other keys, such as "tool_calls", reach the template as they are.
      bos_token, eos_token: texts that the template may write; "" where the vocabulary has none.
      add_generation_prompt: end with the beginning of an assistant's message.
      tools: descriptions of functions, in the form that the template expects.
      **extra: further variables of the template.

    Raises:
      ArgumentError: a message is malformed, or the template refuses the messages (`raise_exception`).
      FormatError: the template is not Jinja, fails, or does too much (see `llama_jax.text.sandbox`).

    Source: https://huggingface.co/docs/transformers/chat_templating
    """
    variables = dict(
        extra,
        messages=[_checked(i, message) for i, message in enumerate(messages)],
        tools=list(tools) if tools else None,
        bos_token=bos_token,
        eos_token=eos_token,
        add_generation_prompt=add_generation_prompt,
    )
    start_budget()
    try:
        compiled = _compiled(CHATML if template is None else template)
        return "".join(_bounded(compiled.generate(variables)))
    except TemplateRefusedError as error:
        raise ArgumentError(f"The chat template refuses the messages: {reason(error)}.") from error
    except (TypeError, UndefinedError) as error:
        empty = next((i for i, message in enumerate(messages) if message.get("content") is None), None)
        if empty is None:
            raise FormatError(f"The chat template cannot be used: {reason(error)}.") from error
        raise ArgumentError(
            f"Message {empty} has no content, which the chat template may need: {reason(error)}."
        ) from error
    except Exception as error:  # templates are programs: anything can go wrong in them
        raise FormatError(f"The chat template cannot be used: {reason(error)}.") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    **extra: Any,
) -> list[int]:
    """Token ids of a conversation; arguments and errors as in `render_chat`.

    The template is `template`, else the tokenizer's. Its special tokens become ids. BOS comes first exactly once where
    the template writes it or the vocabulary adds it; EOS stands only where the template writes it. Special tokens
    inside messages and tools stay text: each is rendered as a single private-use character and put back afterwards, so
    that a user cannot close his own turn. For messages without special tokens the ids are those of the whole text.
    """
    literals = _literals(tokenizer, [messages, tools])
    hidden = {text: character for character, text in literals.items()}
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    text = render_chat(
        tokenizer.chat_template if template is None else template,
        _replaced(messages, hidden),
        bos_token="" if bos is None else tokenizer.piece(bos),
        eos_token="" if eos is None else tokenizer.piece(eos),
        add_generation_prompt=add_generation_prompt,
        tools=_replaced(tools, hidden),
        **extra,
    )
    ids = tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=True, literals=literals)
    if bos is not None and tokenizer.add_bos and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return Sandbox().from_string(template)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_TEXT:
            raise FormatError(f"it writes more than {MAX_TEXT} characters")
        yield piece


def _checked(index: int, message: Any) -> dict[str, Any]:
    """A copy of the message with its content as a string."""
    where = f"Message {index}"
    if not isinstance(message, Mapping):
        raise ArgumentError(f"{where} is {shown(message)}; a mapping with a role and a content is needed.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ArgumentError(f"{where} has the role {shown(role)}; a string such as 'user' is needed.")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(where, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise ArgumentError(
            f"{where} has the content {shown(content)}; a string, a list of text parts or None is needed."
        )
    return {**message, "content": content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ArgumentError(f"{where} has the part {shown(part)}; only parts {{'type': 'text', 'text': ...}} are allowed.")


def _strings(value: Any) -> Iterator[str]:
    """All strings in a nest of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _literals(tokenizer: Tokenizer, value: Any) -> dict[str, str]:
    """A private-use character that `value` does not contain for each special token whose text it contains."""
    everything = "\0".join(_strings(value))
    present = [text for text in tokenizer.special_tokens if text in everything]
    free = (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in everything)
    return dict(zip(free, sorted(present, key=len, reverse=True), strict=False))


def _replaced(value: Any, replacements: Mapping[str, str]) -> Any:
    """A copy of a nest of lists and mappings with texts replaced in every string."""
    if not replacements:
        return value
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {_replaced(key, replacements): _replaced(item, replacements) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, replacements) for item in value]
    return value
