"""The persistent compilation cache of the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infer.compile_cache import use_compile_cache

PROGRAM = """
import jax, jax.numpy as jnp
from infer.compile_cache import use_compile_cache
from infer.timing import _compilations
assert use_compile_cache() is not None
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(1) if event == "/jax/compilation_cache/cache_hits" else None
)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(len(hits))
"""


def test_a_second_start_finds_what_the_first_compiled(tmp_path: Path) -> None:
    def start() -> int:
        settings = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        settings |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-W", "error", "-c", PROGRAM]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return int(done.stdout)

    assert start() == 0
    assert start() > 0
    assert any((tmp_path / "clover_jax" / "jax").iterdir())


def test_it_can_be_turned_off_and_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert use_compile_cache() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="no compilation cache"):
        assert use_compile_cache() is None
