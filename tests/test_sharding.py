"""The sharding table, and generation on several devices."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.traverse_util
import pytest
import rigs
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from clover_jax.config import DraftConfig
from clover_jax.sharding import (
    AXES,
    RULES,
    cache_sharding,
    param_shardings,
    row_sharding,
    spec,
)
from clover_jax.weights.clover import abstract_head
from clover_jax.weights.target import abstract_params
from infer import generate

HERE = Path(__file__).parent
BIASED = dataclasses.replace(rigs.CONFIG, qkv_bias=True, out_bias=True, mlp_bias=True)
TIED = dataclasses.replace(rigs.CONFIG, tie_word_embeddings=True)


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def shardings(shapes, config, mesh):
    nested = flax.traverse_util.unflatten_dict(shapes)
    return flax.traverse_util.flatten_dict(param_shardings(nested, config, mesh), sep="/")


@pytest.mark.parametrize("config", [rigs.CONFIG, BIASED, TIED])
@pytest.mark.parametrize("kind", ["target", "head"])
def test_every_parameter_matches_one_rule(config, kind):
    shapes = (
        abstract_params(config)
        if kind == "target"
        else abstract_head(DraftConfig.for_target(config, num_layers=2))
    )
    for path, leaf in shapes.items():
        matching = [s for pattern, s in RULES if re.fullmatch(pattern, "/".join(path))]
        assert len(matching) == 1, path
        assert len(matching[0]) <= len(leaf.shape), path


def test_every_rule_is_used():
    target, head = abstract_params(BIASED), abstract_head(DraftConfig.for_target(BIASED))
    paths = ["/".join(p) for p in (*target, *head)]
    assert [p for p, _ in RULES if not any(re.fullmatch(p, path) for path in paths)] == []


def test_an_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="no sharding rule matches the parameter layers_0/x"):
        spec("layers_0/x")


def test_what_widens_is_split_by_output_and_what_narrows_by_input():
    found = shardings(abstract_params(rigs.CONFIG), rigs.CONFIG, mesh(fsdp=2, tensor=2))
    assert found["layers_0/mlp/up_proj/weight"].spec == P("tensor", "fsdp")
    assert found["layers_0/mlp/down_proj/weight"].spec == P("fsdp", "tensor")
    assert found["layers_1/self_attn/k_proj/weight"].spec == P("tensor", "fsdp")
    assert found["layers_1/self_attn/o_proj/weight"].spec == P("fsdp", "tensor")
    assert found["lm_head"].spec == P("tensor", "fsdp")
    assert found["norm/scale"].spec == P()
    # Half of the 48 rows and half of the 32 columns.
    assert found["layers_0/mlp/up_proj/weight"].shard_shape((48, 32)) == (24, 16)


def test_kv_heads_that_do_not_divide_stay_whole():
    found = shardings(abstract_params(BIASED), BIASED, mesh(tensor=4))  # 2 kv heads
    for name in ("k_proj", "v_proj"):
        assert found[f"layers_0/self_attn/{name}/weight"].spec == P(None, "fsdp")
        assert found[f"layers_0/self_attn/{name}/bias"].spec == P(None)
    assert found["layers_0/self_attn/q_proj/weight"].spec == P("tensor", "fsdp")
    assert cache_sharding(rigs.CONFIG, 1, mesh(tensor=4)).spec == P("data", None)
    assert cache_sharding(rigs.CONFIG, 4, mesh(data=2, tensor=2)).spec == P("data", "tensor")


@pytest.mark.parametrize(
    ("change", "axes", "message"),
    [
        (
            {"vocab_size": 61},
            {"tensor": 4},
            "mesh axis 'tensor' of 4 devices does not divide dimension 0 of embed_tokens, 61",
        ),
        (
            {"num_heads": 6},
            {"tensor": 4},
            "mesh axis 'tensor' of 4 devices does not divide the query heads, 6",
        ),
        (
            {"hidden_size": 36},
            {"fsdp": 8},
            "mesh axis 'fsdp' of 8 devices does not divide dimension 1 of embed_tokens, 36",
        ),
        (
            {"intermediate_size": 50},
            {"tensor": 4},
            "mesh axis 'tensor' of 4 devices does not divide dimension 1 of "
            "layers_0/mlp/down_proj/weight, 50",
        ),
    ],
)
def test_a_dimension_that_does_not_divide_is_named(change, axes, message):
    config = dataclasses.replace(rigs.CONFIG, **change)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        shardings(dict(sorted(abstract_params(config).items())), config, mesh(**axes))


def test_a_batch_that_does_not_divide_is_named():
    message = "mesh axis 'data' of 4 devices does not divide the batch, 3"
    for refused in (
        lambda: row_sharding(3, mesh(data=4)),
        lambda: cache_sharding(rigs.CONFIG, 3, mesh(data=4)),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            refused()


ON_FOUR_DEVICES = """
import dataclasses, json, sys
import jax
import rigs
from clover_jax.sharding import make_mesh, param_shardings
from infer import speculative_generate

model = rigs.rig_r()
mesh = make_mesh(**json.loads(sys.argv[1]))
params = jax.device_put(model.params, param_shardings(model.params, model.config, mesh))
head = param_shardings(model.draft.params, model.config, mesh)
draft = model.draft._replace(
    params=jax.device_put(model.draft.params, head),
    lm_rows=params["lm_head"],
    embedding=params["embed_tokens"],
    lm_head=params["lm_head"],
)
on_mesh = dataclasses.replace(model, params=params, draft=draft)
with jax.set_mesh(mesh):
    made = speculative_generate(on_mesh, rigs.PROMPTS, 12, tree="chain-3")
print(json.dumps(made.token_ids))
"""


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 4},  # more devices than kv heads
        pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_four_devices_say_the_same_as_one(sizes):
    one = generate(rigs.rig_r(), rigs.PROMPTS, 12).token_ids
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{HERE.parent}:{HERE}",
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, json.dumps(sizes)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one
