"""Where parameters and caches lie on several devices.

Mesh axes: "data" splits rows of a batch; "fsdp" splits parameters, which are gathered where they
are used; "tensor" splits heads, MLP width and vocabulary. One table says it for the target and the
draft head. Weights are [out, in]: the products that widen are split by their output, those that
narrow again by their input, so that a layer sums over devices twice.

Axes of arrays: B batch, K kv heads, S slots, H head dim, D model, F MLP, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from clover_jax.config import TargetConfig

AXES = ("data", "fsdp", "tensor")

# Path of a parameter, its parts joined by "/" -> how it lies. Every path matches one line.
RULES: tuple[tuple[str, P], ...] = (
    (r"embed_tokens|lm_head", P("tensor", "fsdp")),  # [V, D]
    (r".+/self_attn/[qkv]_proj/weight", P("tensor", "fsdp")),  # [heads * H, D]
    (r".+/self_attn/[qkv]_proj/bias", P("tensor")),
    (r".+/self_attn/o_proj/weight", P("fsdp", "tensor")),  # [D, heads * H]
    (r".+/mlp/(gate|up)_proj/weight", P("tensor", "fsdp")),  # [F, D]
    (r".+/mlp/(gate|up)_proj/bias", P("tensor")),
    (r".+/mlp/down_proj/weight", P("fsdp", "tensor")),  # [D, F]
    (r".+/(o|down)_proj/bias", P()),
    (r"ad[12]/[qkv]/weight", P("tensor", "fsdp")),  # [D, D], by heads
    (r"ad[12]/[qkv]/bias", P("tensor")),
    (r"fc[12]/weight", P("tensor", "fsdp")),  # [D, D] and [D, 2D]
    (r"fc[12]/bias", P("tensor")),
    (r"(.+/)?\w*norm/scale", P()),
)

_KV_PROJECTION = re.compile(r".+/self_attn/[kv]_proj/(weight|bias)")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of AXES over `devices` (default: all), whose number is the product of the sizes."""
    sizes = (data, fsdp, tensor)
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def spec(path: str) -> P:
    """The table's line for a parameter, such as "layers_0/mlp/up_proj/weight".

    Raises:
      ValueError: no line matches.
    """
    for pattern, found in RULES:
        if re.fullmatch(pattern, path):
            return found
    raise ValueError(f"no sharding rule matches the parameter {path}")


def param_shardings(params: Any, config: TargetConfig, mesh: Mesh) -> Any:
    """A NamedSharding for each parameter of a target or of a draft head.

    Keys and values stay whole on every device of the "tensor" axis if it does not divide the kv
    heads.

    Args:
      params: a nested dict of arrays or of their shapes.
      config: the target's.

    Raises:
      ValueError: a mesh axis that does not divide a dimension, or the query heads, by name.
    """
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    _check_divides("the query heads", config.num_heads, "tensor", mesh)
    found = {}
    for path, leaf in flat.items():
        wanted = spec(path)
        if _KV_PROJECTION.fullmatch(path):
            wanted = P(_kv_axis(config, mesh), *wanted[1:])
        for number, axis in enumerate(wanted):
            _check_divides(f"dimension {number} of {path}", leaf.shape[number], axis, mesh)
        found[path] = NamedSharding(mesh, wanted)
    return flax.traverse_util.unflatten_dict(found, sep="/")


def cache_sharding(config: TargetConfig, batch: int, mesh: Mesh) -> NamedSharding:
    """For keys [B, K, H, S] and values [B, K, S, H]: rows over "data", kv heads over "tensor".

    The heads stay whole on every device if "tensor" does not divide them.

    Raises:
      ValueError: "data" does not divide the batch.
    """
    return NamedSharding(mesh, P(*row_sharding(batch, mesh).spec, _kv_axis(config, mesh)))


def row_sharding(batch: int, mesh: Mesh) -> NamedSharding:
    """For arrays [B, ...] with a value per row.

    Raises:
      ValueError: "data" does not divide the batch.
    """
    _check_divides("the batch", batch, "data", mesh)
    return NamedSharding(mesh, P("data"))


def _kv_axis(config: TargetConfig, mesh: Mesh) -> str | None:
    return None if config.num_kv_heads % mesh.shape["tensor"] else "tensor"


def _check_divides(name: str, size: int, axis: str | None, mesh: Mesh) -> None:
    if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
            f"mesh axis {axis!r} of {mesh.shape[axis]} devices does not divide {name}, {size}"
        )


def whole_width(x: jax.Array) -> jax.Array:
    """x [..., D], with all of D on every device, where `jax.set_mesh` has set a mesh.

    For the residual stream. Left alone, the partitioner may split it like the heads of the draft's
    attention decoders, and every layer of the target then gathers it again.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    split = P(*[P.UNCONSTRAINED] * (x.ndim - 1), None)
    return jax.lax.with_sharding_constraint(x, split)
