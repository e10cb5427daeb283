"""JAX's persistent compilation cache, on for the command line."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import jax


def use_compile_cache() -> Path | None:
    """Keeps compiled programs in the user's cache folder, so that a second start is quick.

    $JAX_COMPILATION_CACHE_DIR names another folder, and turns it off where it is empty. A folder
    that cannot be made gives a warning, and programs are compiled anew each time.

    Returns:
      The folder, or None.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else base / "clover_jax" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"no compilation cache: {error}", stacklevel=2)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder
