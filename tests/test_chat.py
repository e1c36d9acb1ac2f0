"""`llama-jax chat` as a person uses it, and its parts."""

import builtins
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from llama_jax import ArgumentError
from llama_jax.cli.conversation import Messages, Text
from llama_jax.cli.terminal import Terminal, interruptible
from llama_jax.llama import Ending
from llama_jax.text.chat import render_chat
from llama_jax.text.chat_templates import CHAT_TEMPLATES, find_template
from tests.terminal import Screen

# Templates, against the formats that the models' makers publish.

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
RENDERED = {
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n"
    "### Instruction:\nBye\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello"
    "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be brief.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]",
    "vicuna": "<s>Be brief.\n\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: Bye\nASSISTANT:",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n"
    "<|user|>\nBye</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_templates(name):
    assert render_chat(find_template(name), TALK, bos_token="<s>", eos_token="</s>") == RENDERED[name]


def test_finding_a_template():
    assert find_template("{{ messages[0].content }}") == "{{ messages[0].content }}"
    with pytest.raises(ArgumentError, match="no chat template 'gpt'; there are alpaca, chatml"):
        find_template("gpt")


# Conversations, with a model that says what it is told to


class Parrot:
    """Answers with the next of `answers`, each a pair of text and `Ending`."""

    n_ctx = 30

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.ending = None

    def tokenize_prompt(self, text):
        return list(text)

    def without_older_half(self, ids, keep):
        return ids[:keep] + ids[keep + (len(ids) - keep) // 2 :]

    def stream(self, prompt, **options):
        self.asked.append(("".join(prompt), options))
        text, self.ending = self.answers.pop(0)
        yield from text


def turn(conversation, words: str | None, **options) -> str:
    """What the screen shows."""
    shown = "" if words is None else conversation.say(words)
    answer = "".join(conversation.answer(dict(stop=["END"], keep=0) | options))
    return shown + answer + conversation.end(answer)


def test_a_text_grows_from_both_sides():
    model = Parrot(
        ("Hello.\n", Ending("stop", "User:")), ("What?", Ending("eos")), ("So", Ending("limit")), ("x", None)
    )
    text = Text(model, beginning="A talk.\nUser:", prefix=" ", suffix="Bob:", reverse_prompts=["User:"], forget=False)
    assert text.prompt == "User: "
    assert turn(text, "Hi") == "Bob:Hello.\nUser:"
    assert model.asked[0] == ("A talk.\nUser: Hi\nBob:", dict(stop=["END", "User:"], keep=0))
    assert turn(text, "Go/") == "Bob:What?\nUser:"  # an end-of-text token becomes a newline and the reverse prompt
    assert text.text == "A talk.\nUser: Hi\nBob:Hello.\nUser: GoBob:What?\nUser:"
    text.retract()
    assert turn(text, None) == "So\n"
    assert model.asked[2][0] == "A talk.\nUser: Hi\nBob:Hello.\nUser: GoBob:"
    text.retract()
    with pytest.raises(ArgumentError, match="no answer yet"):
        text.retract()
    before = text.text
    text.say("never mind")
    text.undo()
    assert text.text == before
    text.clear()
    assert text.prompt == "User: "
    assert turn(text, "Hi") == "Bob:x\n"  # interrupted


def test_a_long_text_forgets_its_older_half_if_it_may():
    model = Parrot(("a", Ending("limit")), ("b", Ending("limit")))
    text = Text(model, beginning="0123456789" * 4, prefix="", suffix="", reverse_prompts=[], forget=True)
    turn(text, "?/", keep=3)
    assert model.asked[0][0] == "012" + "123456789" + "0123456789"[-9:] + "?" or len(model.asked[0][0]) <= 30
    assert model.asked[0][0].startswith("012")
    assert model.asked[0][0].endswith("789?")


def test_long_messages_forget_the_oldest_if_they_may():
    tokenizer = SimpleNamespace(
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}", bos_id=None, eos_id=None, add_bos=False,
        special_tokens={}, encode=lambda text, **_: list(text),
    )  # fmt: skip
    seen = []
    model = SimpleNamespace(
        tokenizer=tokenizer, n_ctx=30, stream_chat=lambda messages, **_: seen.append([m["content"] for m in messages])
    )
    for forget in (True, False):
        messages = Messages(model, system="sys", template=None, forget=forget)
        for words in ("a" * 10, "b" * 10):
            messages.say(words)
            messages.end("answer")
        messages.say("c" * 10)
        messages.answer({})
    assert seen == [["sys", "b" * 10, "answer", "c" * 10], ["sys", "a" * 10, "answer", "b" * 10, "answer", "c" * 10]]


# Lines


@pytest.fixture
def lines(monkeypatch):
    """`lines(typed, multiline)`: the messages that come of it, and the prompts."""

    def read(typed: list[str | type[BaseException]], multiline: bool = False) -> list[str | None]:
        waiting = iter(typed)

        def line(prompt=""):
            value = next(waiting, EOFError)
            if isinstance(value, str):
                return value
            raise value

        monkeypatch.setattr(builtins, "input", line)
        terminal = Terminal(color="off", multiline=multiline, commands=["/exit", "/read"])
        messages = [terminal.read("> ")]
        while messages[-1] is not None:
            messages.append(terminal.read("> "))
        return messages[:-1]

    return read


def test_lines_become_messages(lines):
    assert lines(["one", "", "two \\", "", "three\\", "four"]) == ["one", "", "two \n", "three\nfour"]
    assert lines(["one\\"]) == ["one"]  # the input ends
    assert lines(["one", KeyboardInterrupt, "two\\", KeyboardInterrupt, "three"]) == ["one", "three"]
    assert lines(["one", KeyboardInterrupt, KeyboardInterrupt, "never"]) == ["one"]


def test_many_lines_become_messages(lines):
    assert lines(["one", "two\\", "/exit", "three", "/exit", "four\\"], multiline=True) == [
        "one\ntwo",
        "/exit",
        "three\n/exit\nfour",
    ]
    assert lines(["/read a file", "/user/home", "\\"], multiline=True) == ["/read a file", "/user/home\n"]


def test_a_first_ctrl_c_sets_the_event_and_a_second_one_raises():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stopped:
        assert not stopped.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stopped.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# A terminal


@pytest.mark.skipif(sys.platform != "linux", reason="pseudo-terminals as Linux has them")
def test_in_a_terminal(tmp_path):
    green = "> \x1b[1;32m"
    command = [sys.executable, "-m", "llama_jax", "chat", "--temp", "1", "-s", "3", "--color", "on"]
    with Screen(command, tmp_path) as screen:
        screen.wait_for(green)
        screen.type("Tell me a story.\n")
        screen.wait_for_lines(4)
        screen.type("\x03")  # stops the answer ...
        screen.wait_for(green)
        story = screen.text
        screen.type("typed in vain")
        screen.wait_for("typed in vain")
        time.sleep(0.5)  # until Python waits again: a signal just before that is noticed at the next key only
        screen.type("\x03")  # ... and here the line
        screen.wait_for(green)
        screen.type("/nonsense\n")
        screen.wait_for(green)
        screen.type("/exit\n")
        assert screen.exit_code() == 0
        errors = screen.errors
    assert story.startswith(f"{green}Tell me a story.\n\x1b[0m")
    assert "^C" in story
    assert re.search(r"typed in vain(\^C)?\x1b\[0m\n> ", screen.text)
    assert "/nonsense is not a command; there are /exit, /clear, /regen, /read FILE." in errors
    assert "Traceback" not in errors
