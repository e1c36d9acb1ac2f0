"""Constraints: which texts they take, and that what is generated matches them."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import llama_jax
from llama_jax import ArgumentError, Llama, gbnf, json_schema, lark, regex, session
from llama_jax.gbnf_notation import gbnf_to_lark
from llama_jax.grammar import ConstraintCompiler, Grammar, TokenMasks
from llama_jax.llama import shipped_model
from llama_jax.sampling.from_text import _longest_matches, tokens_within
from llama_jax.text.tokenizer import Tokenizer
from tests.tiny import tiny_llama

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with llama_jax.open_model(shipped_model()) as file:
        return file.tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer)


@pytest.fixture(scope="module")
def model() -> Llama:
    return tiny_llama()


def accepts(compiler: ConstraintCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether `text` as a whole matches."""
    matcher = compiler.compile(grammar).start()
    ids = _longest_matches(tokenizer, text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# at most one new line
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES = [
    ('root ::= ("yes" | "no") "."', ["yes.", "no."], ["yes", "no..", "maybe.", ""]),
    (r'root ::= [a-z]+ "b"', ["ab", "abb", "bb"], ["b", "a", "ba"]),
    ('root ::= ws " a"\nws ::= " "*', [" a", "    a"], ["a", "  "]),
    ('root ::= "abc" "d" | [a-z] [a-z] [a-z] "e"', ["abcd", "abce", "xyze"], ["abcf", "abde."]),
    (r'root ::= "\u00e9/" [\u00e9-\u00ff] . [^a/\]-]{2}', ["é/ý\nbb", "é/ÿé?!"], ["é/a\nbb", "é/é.a."]),
    ('root ::= "(" root ")" | [a-z]+ "b"', ["((ab))", "abb"], ["(b)", "((ab)", "()"]),
    ('root ::= ("x" | ) "y"?', ["", "x", "y", "xy"], ["yx", "xx"]),
    ("root ::= x{2,3} y{2} z{1,}\nx ::= [ab]\ny::=[c]\nz ::= [^\\n]", ["abccq", "aaaccqq"], ["accq", "aacc", "abcc\n"]),
    (
        'root ::= expr\nexpr ::= term ("+" term)* # sums\nterm ::= [0-9]+ | "(" expr ")"',
        ["1+(2+33)", "7"],
        ["(1", "1++2", "+"],
    ),
    (r'root ::= "\x41\U0001F600\t\"\\\[\]"', ['A😀\t"\\[]'], ["A"]),
    ('root ::= "a" <[13]> "b"', ["a\nb"], ["ab"]),
    (JSON, ['{}', '{"a": [1, 2.5e3, {"b": "x\\n"}], "c":null }', '{"a": true\n\t}'], ['{"a":}', "[1]", '{"a": tru}']),
]  # fmt: skip


@pytest.mark.parametrize(("text", "good", "bad"), CASES, ids=[text[:30] for text, _, _ in CASES])
def test_gbnf(compiler, tokenizer, text, good, bad):
    for candidate in good:
        assert accepts(compiler, tokenizer, gbnf(text), candidate), candidate
    for candidate in bad:
        assert not accepts(compiler, tokenizer, gbnf(text), candidate), candidate


def test_an_excluded_token(compiler, tokenizer):
    assert not accepts(compiler, tokenizer, gbnf('root ::= "a" !<[13]>'), "a\n")
    assert accepts(compiler, tokenizer, gbnf('root ::= "a" !<[13]>'), "ax")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('root = "a"', "Line 1 of the grammar has a mistake: ::= is expected, not '='."),
        ('\nroot ::= "a', "Line 2 of the grammar has a mistake: the text ends within quotes or brackets."),
        ("root ::= foo", "The grammar has no rule 'foo', to which another one refers."),
        ('a ::= "x"', "The grammar has no rule root, which is where a text begins."),
        ("", "The grammar has no rule root, which is where a text begins."),
        ("root ::= [a", "the text ends within quotes or brackets"),
        (r'root ::= "\q"', r"\q is not known"),
        (r'root ::= "\ud800"', r"\ud800 is not a character"),
        (r'root ::= "\x4"', "hexadecimal digits is expected"),
        ('root ::= ("a"', ") is expected, not 'the end'"),
        ('root ::= "a" )', "')' is not expected"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        ('root ::= "a"{3,1}', "the bounds 3 and 1 are not in order"),
        ('root ::= "a"{9999}', "above 2000"),
        ('root ::= "a"\nroot ::= "b"', "Line 2 of the grammar has a mistake: the rule root is there twice."),
        ('root ::= "a" | *', "'*' is not expected"),
        ("root ::= !<think>", "only a number can be excluded"),
        ("root ::= " + "(" * 5000, "brackets stand more than 200 deep"),
        ("a ::= [a-z]{2000}\n" + "".join(f"{'b' * i} ::= {'b' * (i - 1) or 'a'} {'b' * (i - 1) or 'a'}\n" for i in
         range(1, 40)) + f"root ::= {'b' * 39}", "is longer than 1048576 characters"),
    ],
)  # fmt: skip
def test_a_mistake_in_gbnf_is_one_sentence(text, sentence):
    with pytest.raises(ArgumentError) as error:
        gbnf(text)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_grammar_without_recursion_is_one_expression():
    assert gbnf_to_lark('root ::= a b\na ::= "x" | "y"\nb ::= [0-9]{2}').count("\n") == 1


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (lambda: regex("[a"), "The regular expression cannot be used: .*unclosed character class"),
        (lambda: regex(5), "The regex is of type int"),
        (lambda: json_schema({"type": "foo"}), "The JSON schema cannot be used: Invalid type: foo"),
        (lambda: json_schema({"uniqueItems": True, "type": "array"}), "Unimplemented keys"),
        (lambda: json_schema("{"), "The JSON schema is not JSON"),
        (lambda: json_schema({"type": {1}}), "The JSON schema is not JSON"),
        (lambda: json_schema([1]), "of type list"),
        (lambda: lark("begin: /a/"), "The grammar cannot be used"),
        (lambda: gbnf("root ::= <nope>"), "The grammar cannot be used: .*unknown special token"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(compiler, grammar, sentence):
    with pytest.raises(ArgumentError, match=sentence) as error:
        compiler.compile(grammar())
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_without_the_library_the_sentence_says_what_to_install(monkeypatch, tokenizer):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ArgumentError, match=r"pip install 'llama-jax\[grammar\]'"):
        ConstraintCompiler(tokenizer).compile(regex("a"))


def test_text_never_becomes_a_special_token(compiler, tokenizer):
    masks = TokenMasks([compiler.compile(regex("(?s:.*)")), None], tokenizer.vocab_size + 40)
    words = masks.words()
    allowed = [i for i in range(tokenizer.vocab_size) if int(words[0, i // 32]) >> (i % 32) & 1]
    assert tokenizer.bos_id not in allowed
    assert tokenizer.eos_id in allowed  # the text may end
    assert len(allowed) > 1900  # all that may begin a text in UTF-8
    assert (words[1] == -1).all()
    assert not words[0, (tokenizer.vocab_size + 31) // 32 :].any()  # padding


def test_the_space_that_encoding_puts_before_a_text_goes_again(tokenizer):
    for text in ("yes {", "é", " two", "\n", ""):
        ids = tokens_within(tokenizer, text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


# Generation


def test_generated_json_fits_its_schema(model):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "dead": {"type": "boolean"}},
        "required": ["name", "dead"],
        "additionalProperties": False,
    }
    for seed in range(3):
        value = json.loads(model.generate("HAMLET.\n", max_tokens=None, seed=seed, constraint=json_schema(schema)))
        assert set(value) == {"name", "dead"}
        assert len(value["name"]) <= 12
        assert isinstance(value["dead"], bool)


def test_a_text_ends_when_nothing_more_may_follow(model):
    pattern = r"[0-9]{3}-[a-z]{4,8}"
    text = model.generate("ROMEO.\n", seed=4, constraint=regex(pattern), ignore_eos=True)
    assert re.fullmatch(pattern, text)
    (done,) = model.complete("ROMEO.\n", seed=4, constraint=regex(pattern))
    assert (done.text, done.finish_reason) == (text, "stop")
    assert re.fullmatch("[0-9]", model.generate("ROMEO.\n", max_tokens=9, temperature=0.0, constraint=regex("[0-9]")))


def test_rows_have_grammars_of_their_own(model):
    session = model.new_session(3)
    prompts = [model.tokenize_prompt("ROMEO.\n")] * 3
    constraints = [model.constraint(regex("[0-9]{4}")), None, model.constraint(gbnf('root ::= "yes" | "no"'))]
    rows = ["", "", ""]
    chunks = session.generate(
        prompts, model.sampling(batch=3, temperature=0.0), max_tokens=20, eos_ids=model.tokenizer.eog_ids,
        constraints=constraints,
    )  # fmt: skip
    for new in chunks:
        rows = [
            row + b"".join(map(model.tokenizer.token_bytes, ids)).decode() for row, ids in zip(rows, new, strict=True)
        ]
    assert re.fullmatch("[0-9]{4}", rows[0])
    assert rows[1] == model.generate("ROMEO.\n", max_tokens=20, temperature=0.0)
    assert rows[2] in ("yes", "no")


def test_streamed_and_chat_texts_obey_too(model):
    options = dict(constraint=regex("(ab|ba){5}"), seed=1)
    text = "".join(model.stream("x", **options))
    assert re.fullmatch("(ab|ba){5}", text)
    assert model.generate("x", **options) == text
    messages = [{"role": "user", "content": "Yes or no?"}]
    assert model.chat(messages, constraint=gbnf('root ::= "yes" | "no"'), seed=1) in ("yes", "no")


def test_what_nothing_can_satisfy_is_an_error(model):
    ban = {i: float("-inf") for i in range(model.tokenizer.vocab_size)}
    with pytest.raises(ArgumentError, match="Sequence 0 cannot go on"):
        model.generate("ROMEO.\n", max_tokens=3, logit_bias=ban)
    with pytest.raises(ArgumentError, match="The grammar cannot be used: it takes no text"):
        model.generate("ROMEO.\n", max_tokens=3, constraint=gbnf("root ::= root"))
    assert model.generate("ROMEO.\n", constraint=gbnf('root ::= ""')) == ""
    assert model.generate("ROMEO.\n", max_tokens=1, temperature=0.0)


@pytest.mark.parametrize("wrong", ["[a-z]", {"type": "object"}])
def test_a_constraint_that_is_none_raises_at_the_call(model, wrong):
    with pytest.raises(ArgumentError, match="constraint is of type"):
        model.stream("x", constraint=wrong)


def test_warming_up_compiles_the_constrained_steps(model):
    model.warm_up("ROMEO.\n", constrained=True, temperature=0.0)
    compiled = session._sample_jit._cache_size()
    assert model.generate("ROMEO.\n", max_tokens=2, temperature=0.0, constraint=regex("[a-z]{9}"))
    assert session._sample_jit._cache_size() == compiled


def test_masks_are_words_of_the_device_form(tokenizer, compiler):
    words = TokenMasks([compiler.compile(regex("a"))], tokenizer.vocab_size).words()
    assert words.dtype == np.int32
    assert jnp.asarray(words).shape == (1, 64)


def test_schemas_nested_without_end_are_one_sentence(compiler):
    with pytest.raises(ArgumentError, match="The JSON schema"):
        json_schema("[" * 100_000)
    deep = '{"type":"object","properties":{"a":' * 100 + "true" + "}}" * 100
    with pytest.raises(ArgumentError, match="The JSON schema"):
        compiler.compile(json_schema(deep))
