"""Several hosts: two processes with CPU devices do what one does."""

import json
import os
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import ArgumentError, start_hosts
from tests.conftest import REPOSITORY
from tests.placement import hosts
from tests.tiny import tiny_params


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def on_two_hosts(command: list[str], *, numbers: tuple[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """The same command twice, each with its number at the end."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_NUM_CPU_DEVICES": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, *command, number],
            cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in numbers
    ]  # fmt: skip
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=240)
            done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return done


@pytest.mark.slow
def test_two_hosts_compute_what_one_does():
    command = ["-m", "tests.placement.hosts", f"localhost:{free_port()}", "2"]
    results = []
    for done in on_two_hosts(command, numbers=("0", "1")):
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    params = tiny_params(hosts.CONFIG)
    tokens = hosts.generation(params, hosts.CONFIG, None)
    losses = hosts.training_step(params, hosts.CONFIG, jnp.asarray(hosts.batch()))
    for result in results:
        assert result["devices"] == 4
        assert result["shard"] == [16, 32]
        assert result["tokens"] == tokens
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_the_command_on_two_hosts_prints_once():
    command = ["-m", "llama_jax", "generate", "-p", "ROMEO.\n", "-n", "8", "-c", "32", "--num-hosts", "2"]
    command += ["--coordinator", f"localhost:{free_port()}", "--host-id"]
    first, second = on_two_hosts(command, numbers=("0", "1"))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-2000:] + second.stderr[-2000:]
    # Gloo, which joins CPUs, writes to standard output, too.
    texts = [[line for line in done.stdout.splitlines() if "[Gloo]" not in line] for done in (first, second)]
    assert any(texts[0])
    assert texts[1] == []
    assert "offloaded" in first.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("localhost:1234", 2, None), "need all of --coordinator, --num-hosts and --host-id"),
        ((None, 2, 0), "need all of"),
        (("localhost", 2, 0), "The coordinator is 'localhost'; it must be like address:port, or 'auto'."),
        (("localhost:port", 2, 0), "The coordinator is 'localhost:port';"),
        (("localhost:1234", 0, 0), "num_hosts is 0; it must be an integer from 1"),
        (("localhost:1234", 2, 2), "host_id is 2; it must be a number from 0 to 1."),
        (("localhost:1234", 2, -1), "host_id is -1; it must be a number from 0 to 1."),
        (("auto", 2, None), "The coordinator is 'auto', which finds out the number of hosts"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        start_hosts(*arguments)


def test_one_host_needs_no_arguments():
    start_hosts()
