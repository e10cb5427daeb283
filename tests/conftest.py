"""Options for the marked tests, and the platform the tests run on."""

import os
from collections.abc import Iterator

import pytest

# Marker -> why a test that carries it is left out by default.
MARKERS = {"slow": "is slow", "tpu": "needs a TPU", "gpu": "needs a GPU"}


def pytest_addoption(parser: pytest.Parser) -> None:
    for marker, why in MARKERS.items():
        parser.addoption(
            f"--run-{marker}", action="store_true", help=f"also run tests marked {marker} ({why})"
        )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # commands then keep nothing at home
    # Before any test module imports jax. An accelerator is used only where it was asked for.
    if not (config.getoption("--run-tpu") or config.getoption("--run-gpu")):
        os.environ["JAX_PLATFORMS"] = "cpu"


@pytest.fixture(autouse=True, scope="module")
def _no_compiled_programs_left() -> Iterator[None]:
    """Forgets what a module compiled. Every program on the CPU takes some hundred memory mappings,
    and Linux gives a process 65,530; XLA aborts where there are no more."""
    yield
    import jax

    jax.clear_caches()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, why in MARKERS.items():
        if config.getoption(f"--run-{marker}"):
            continue
        skip = pytest.mark.skip(reason=f"{why}: run with --run-{marker}")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)
