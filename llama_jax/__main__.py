"""`python -m llama_jax` is the command `llama-jax`."""

from llama_jax.cli.main import console

console()
