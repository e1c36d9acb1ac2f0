r"""Talks with a model. /exit ends, /clear forgets, /regen answers again, /read FILE sends a file; a line that ends in a
backslash goes on. Ctrl-C stops an answer. With --in-prefix or --in-suffix the conversation is one text without a
template, which -p begins."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_jax.cli import options
from llama_jax.cli.conversation import Conversation, Messages, Text
from llama_jax.cli.terminal import Terminal, interruptible
from llama_jax.errors import ArgumentError, LlamaJaxError

if TYPE_CHECKING:
    from llama_jax.llama import Llama

_COMMANDS = ("/exit", "/clear", "/regen", "/read FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_options(parser)
    system = parser.add_mutually_exclusive_group()
    system.add_argument("-sys", "--system-prompt", metavar="TEXT", help="the system message")
    system.add_argument("-sysf", "--system-prompt-file", type=Path, metavar="FILE", help="a file with it")
    options.add_prompt_options(parser, "the first message, or what the text begins with")
    parser.add_argument("-st", "--single-turn", action="store_true", help="end after one answer")
    options.add_length_options(parser, "an answer")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--chat-template", metavar="NAME", help="a built-in template, or Jinja; default: the model's")
    template.add_argument("--chat-template-file", type=Path, metavar="FILE", help="a file with a Jinja template")
    parser.add_argument(
        "-r",
        "--reverse-prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="gives the turn back to the user; may be repeated",
    )
    parser.add_argument("--in-prefix", metavar="TEXT", help="stands before the user's words, instead of a template")
    parser.add_argument("--in-suffix", metavar="TEXT", help="stands after the user's words, instead of a template")
    parser.add_argument(
        "-mli",
        "--multiline-input",
        action="store_true",
        help="a message has many lines; a backslash at the end of a line sends it",
    )
    parser.add_argument(
        "-co",
        "--color",
        nargs="?",
        const="on",
        default="auto",
        choices=["on", "off", "auto"],
        help="the user's words in green; default auto, on a terminal",
    )
    options.add_speculation_options(parser)
    options.add_sampling_options(parser)


def answer(conversation: Conversation, stream_options: Mapping[str, Any]) -> None:
    """Prints the answer as it comes; Ctrl-C ends it early, a second one without delay."""
    pieces: list[str] = []
    stream = conversation.answer(stream_options)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(stream), interruptible() as stopped:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
            if stopped.is_set():
                break
    print(conversation.end("".join(pieces)), end="", flush=True)


def _template(arguments: argparse.Namespace) -> str | None:
    from llama_jax.text.chat_templates import find_template

    if arguments.chat_template_file is not None:
        return options.read_text_file(arguments.chat_template_file)
    return None if arguments.chat_template is None else find_template(arguments.chat_template)


def _texts(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that are texts, with their escapes read."""

    def text(value: str | None) -> str | None:
        return options.unescape(value) if value is not None and arguments.escape else value

    system = text(arguments.system_prompt)
    if arguments.system_prompt_file is not None:
        system = options.read_text_file(arguments.system_prompt_file).removesuffix("\n")
    prompt = text(arguments.prompt)
    if arguments.file is not None:
        prompt = options.read_text_file(arguments.file).removesuffix("\n")
    return dict(
        system=system,
        prompt=prompt,
        prefix=text(arguments.in_prefix),
        suffix=text(arguments.in_suffix),
        reverse_prompts=[options.unescape(r) if arguments.escape else r for r in arguments.reverse_prompt],
        template=_template(arguments),
    )


def run(arguments: argparse.Namespace) -> None:
    options.check_sampling(arguments)
    texts = _texts(arguments)
    wanted = options.speculation(arguments)
    model, load_seconds = options.load_model(arguments)
    options.speculate(model, arguments, wanted)
    sampling = options.sampling_options(arguments, model.n_ctx)
    constraint = options.grammar(arguments)
    first_text = texts["system"] or texts["prompt"] or ""
    options.compile_ahead(model, first_text, sampling, constrained=constraint is not None)
    stream_options = sampling | options.length_options(arguments) | dict(constraint=constraint)
    terminal = Terminal(
        color=arguments.color,
        multiline=arguments.multiline_input,
        commands=[command.split()[0] for command in _COMMANDS],
    )
    conversation, first = _conversation(model, texts, stream_options)
    if first is None:
        terminal.show(texts["prompt"] or "")
    else:
        terminal.show(f"{conversation.prompt}{first}\n")
    while (text := first if first is not None else terminal.read(conversation.prompt)) is not None:
        first = None
        try:
            wanted = _obey(text, conversation, terminal, stream_options)
            if wanted == "end":
                break
            if wanted == "answer":
                answer(conversation, stream_options)
                options.note_full_context(model)
                if arguments.single_turn:
                    break
        except LlamaJaxError as error:
            if arguments.single_turn:
                raise
            hint = " /clear forgets what was said." if "the context holds" in str(error) else ""
            print(f"llama-jax: {error}{hint}", file=sys.stderr)
            conversation.undo()
    if model.timings.prompt_tokens:
        print(options.speed_line(model, load_seconds), file=sys.stderr)


def _conversation(
    model: Llama, texts: Mapping[str, Any], stream_options: dict[str, Any]
) -> tuple[Conversation, str | None]:
    """The conversation that the options ask for, and the user's first words if they give them."""
    forget = stream_options["context_shift"]
    if texts["prefix"] is None and texts["suffix"] is None:
        stream_options["stop"] = [*stream_options["stop"], *texts["reverse_prompts"]]
        return Messages(model, system=texts["system"], template=texts["template"], forget=forget), texts["prompt"]
    if texts["system"] or texts["template"]:
        raise ArgumentError("--in-prefix and --in-suffix stand for a template: give no system prompt or template.")
    return Text(
        model,
        beginning=texts["prompt"] or "",
        prefix=texts["prefix"] or "",
        suffix=texts["suffix"] or "",
        reverse_prompts=texts["reverse_prompts"],
        forget=forget,
    ), None


def _obey(
    text: str, conversation: Conversation, terminal: Terminal, stream_options: dict[str, Any]
) -> Literal["end", "answer", "next line"]:
    """Does what the user's line asks for, up to the answer, and tells what comes then."""
    command, _, rest = text.strip().partition(" ")
    if command == "/exit":
        return "end"
    if command == "/clear":
        conversation.clear()
    if command in ("/clear", ""):
        return "next line"
    if command == "/regen":
        conversation.retract()
        if stream_options["seed"] != -1:
            stream_options["seed"] += 1  # the same seed would give the same answer
    elif command == "/read":
        if not rest.strip():
            raise ArgumentError("/read needs a file: /read FILE.")
        terminal.show(conversation.say(options.read_text_file(Path(rest.strip()))))
    elif command.startswith("/") and "/" not in command[1:]:
        raise ArgumentError(f"{command} is not a command; there are {', '.join(_COMMANDS)}.")
    else:
        terminal.show(conversation.say(text))
    return "answer"
