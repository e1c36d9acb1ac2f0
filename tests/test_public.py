"""What `import llama_jax` offers."""

import ast
import inspect
import subprocess
import sys

import pytest

import llama_jax
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("name", llama_jax.__all__)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(llama_jax, name)
    if callable(value):
        assert inspect.getdoc(value), name
        assert value.__module__ == f"llama_jax.{llama_jax._MODULE_OF[name]}"


def test_type_checkers_see_the_same_names():
    tree = ast.parse((REPOSITORY / "llama_jax" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        node.module.removeprefix("llama_jax."): tuple(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert seen == llama_jax._PUBLIC


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        llama_jax.nonsense  # noqa: B018


def test_the_import_alone_does_not_start_jax():
    code = "import sys, llama_jax; dir(llama_jax); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
