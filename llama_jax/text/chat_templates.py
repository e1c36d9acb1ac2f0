"""Chat templates by name, for models whose file has none or a wrong one.

Each is the format that the named models were trained with, written for `llama_jax.text.chat.render_chat`. Where a model
knows no system message, it stands at the beginning of the first question.
"""

from __future__ import annotations

from llama_jax.errors import ArgumentError, shown
from llama_jax.text.chat import CHATML

_LLAMA2 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + ns.system + m.content + ' [/INST]' }}"
    "{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
_ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_VICUNA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_ALPACA = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% else %}{{ '### Response:\n' + m.content + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)

CHAT_TEMPLATES = {
    "alpaca": _ALPACA,
    "chatml": CHATML,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
"""Jinja sources by name."""


def find_template(text: str) -> str:
    """The template of that name, or `text` itself if it is Jinja.

    Raises:
      ArgumentError: it is neither.
    """
    if "{{" in text or "{%" in text:
        return text
    if text not in CHAT_TEMPLATES:
        names = ", ".join(CHAT_TEMPLATES)
        raise ArgumentError(f"There is no chat template {shown(text)}; there are {names}, and Jinja text.")
    return CHAT_TEMPLATES[text]
