"""Times that mean something: without compilation, and with the machine they were taken on."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

T = TypeVar("T")

_COMPILATION = "/jax/core/compile/backend_compile_duration"


def steady(call: Callable[[], T]) -> T:
    """The result of a call during which nothing was compiled.

    If something was, which happens in the first call of a bucket, the call is made again.

    Raises:
      RuntimeError: the second call compiles too.
    """
    compilations = _compilations()
    for _ in range(2):
        before = len(compilations)
        result = call()
        if len(compilations) == before:
            return result
    raise RuntimeError("the same call compiled twice, so it cannot be timed")


def compile_seconds() -> float:
    """Spent in compiling since `steady` was first called."""
    return sum(_compilations())


@functools.cache
def _compilations() -> list[float]:
    """Seconds of each compilation in this process since the first call."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILATION:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


def fastest_dtype() -> str:
    """The dtype in which this machine multiplies fastest: float32 on CPUs without AMX.

    The matrix units of a CPU check a tree of tokens in little more time than one token.
    """
    if jax.default_backend() != "cpu":
        return "bfloat16"
    return "bfloat16" if "amx_bf16" in _cpuinfo() else "float32"


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")  # Linux alone has it
    return path.read_text() if path.exists() else ""


def machine() -> str:
    """What the model runs on, such as '2 CPU cores (name of the CPU)' or 'NVIDIA H200'."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return str(device.device_kind)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = re.search(r"^model name\s*: (.+)$", _cpuinfo(), re.M)
    return f"{cores} CPU core{'' if cores == 1 else 's'}" + (f" ({name[1]})" if name else "")
