"""The programs of a big model, compiled for a TPU that need not be here, without any weights.

libtpu brings the compiler; parameters, caches and requests are shapes with a place on the chips.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from clover_jax import cache as kv
from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.matmul import matmul
from clover_jax.rope import Rope
from clover_jax.sharding import cache_sharding, make_mesh, param_shardings, row_sharding
from clover_jax.target import lm_head
from clover_jax.tree import AnyTree
from clover_jax.weights.clover import abstract_head
from clover_jax.weights.target import abstract_params
from infer import session
from infer.call import Call, prepare
from infer.decode import DecodeState, Weights
from infer.drafter import Draft
from infer.load import Model

# No search for a TPU, no complaint that there is none, no lock against other processes.
_COMPILER_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

DTYPE = jnp.dtype(jnp.bfloat16)  # of parameters and caches, as `load` has them on accelerators


class Machine(NamedTuple):
    """A TPU slice.

    Attributes:
      topology: its name for libtpu.
      chips: how many of its chips are used, all of them on the "tensor" axis.
    """

    topology: str
    chips: int


MACHINES = {
    "v6e-1": Machine("v6e:2x2", 1),
    "v5e-8": Machine("v5e:2x4", 8),
    "v5p-4": Machine("v5p:2x2x1", 4),
}

_LLAMA_3_8B = TargetConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=128, theta=500000.0),
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
MODELS = {
    "llama-3-8b": _LLAMA_3_8B,
    "vicuna-7b": dataclasses.replace(
        _LLAMA_3_8B,
        vocab_size=32000,
        intermediate_size=11008,
        num_kv_heads=32,
        rope=Rope(head_dim=128, theta=10000.0),
        max_position_embeddings=4096,
    ),
}


def chips(machine: Machine) -> Mesh:
    """The machine's mesh.

    Raises:
      ValueError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "the TPU compiler is libtpu, which is not installed: pip install 'jax[tpu]'"
        )
    for name, value in _COMPILER_ALONE.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=machine.topology)
    return make_mesh(tensor=machine.chips, devices=topology.devices[: machine.chips])


def head_for(target: TargetConfig, draft_vocab: int) -> DraftConfig:
    """The default head, proposing from `draft_vocab` tokens, or from all if there are no more."""
    return DraftConfig.for_target(target, draft_vocab_size=min(draft_vocab, target.vocab_size))


class Programs(NamedTuple):
    """What is compiled of one model on one mesh, for one batch size and number of slots."""

    mesh: Mesh
    target: TargetConfig
    head: DraftConfig
    batch: int
    slots: int
    chunk: int

    def with_layers(self, number: int) -> Programs:
        """The same with another number of the target's layers; the head keeps its own."""
        return self._replace(target=dataclasses.replace(self.target, num_layers=number))

    def decode(self, tree: AnyTree) -> jax.stages.Compiled:
        """The decode loop; plain for a tree without paths."""
        call = self._call(tree)
        state = self._state(call)
        steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, P()))
        with jax.set_mesh(self.mesh):
            lowered = session._decode.lower(call.shape, call.weights, call.request, state, steps)
        return lowered.compile()

    def prefill(self, tree: AnyTree) -> jax.stages.Compiled:
        """The loop that reads prompts, `chunk` tokens a step; a tree with paths brings the head."""
        call = self._call(tree)
        with jax.set_mesh(self.mesh):
            lowered = session._prefill.lower(
                call.shape.target,
                call.shape.draft,
                call.weights,
                call.request,
                call.prompt,
                call.prompt_length,
                slots=call.slots,
                chunk=call.chunk,
            )
        return lowered.compile()

    def smallest_large(self) -> int:
        """Bytes on one chip of the smaller of keys of a layer and the weights that make them."""
        one = dataclasses.replace(self.target, num_layers=1)
        keys = self.cache_bytes(one) // 2
        weight = self._weights().target["layers_0"]["self_attn"]["k_proj"]["weight"]
        return min(keys, _bytes_per_chip(weight))

    def layer_bytes(self) -> int:
        """Bytes of all the target's layers on one chip."""
        target = self._weights().target
        return _bytes_per_chip([p for name, p in target.items() if name.startswith("layers_")])

    def target_bytes(self) -> int:
        """Bytes of the target on one chip that a pass reads: its layers and the LM head."""
        return self.layer_bytes() + _bytes_per_chip(lm_head(self._weights().target))

    def cache_bytes(self, config: TargetConfig) -> int:
        """Bytes of the caches of `config.num_layers` layers on one chip."""
        return _bytes_per_chip(self._cache(config))

    def draft_bytes(self) -> dict[str, int]:
        """Bytes on one chip of each module of the head, and of "lm_rows"."""
        draft = self._weights().draft
        assert draft is not None
        found = {name: _bytes_per_chip(module) for name, module in draft.params.items()}
        return found | {"lm_rows": _bytes_per_chip(draft.lm_rows)}

    def _weights(self) -> Weights:
        target = self._placed(abstract_params(self.target))
        target = jax.tree_util.tree_map_with_path(_norms_in_f32, target)
        rows = self.head.draft_vocab_size
        whole = rows == self.target.vocab_size
        head = target["lm_head"]
        subset = jax.ShapeDtypeStruct((rows, self.target.hidden_size), DTYPE)
        ids: Any = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(self.mesh, P()))
        draft = Draft(
            params=self._placed(abstract_head(self.head)),
            lm_rows=head if whole else self._placed({("lm_head",): subset})["lm_head"],
            token_ids=ids,
            embedding=target["embed_tokens"],
            lm_head=head,
        )
        return Weights(target, draft)

    def _placed(self, flat: dict[tuple[str, ...], jax.ShapeDtypeStruct]) -> dict[str, Any]:
        shapes = flax.traverse_util.unflatten_dict(flat)
        where = param_shardings(shapes, self.target, self.mesh)
        return jax.tree.map(
            lambda s, place: jax.ShapeDtypeStruct(s.shape, DTYPE, sharding=place), shapes, where
        )

    def _cache(self, config: TargetConfig) -> Any:
        place = cache_sharding(config, self.batch, self.mesh)
        shapes = jax.eval_shape(lambda: kv.init(config, self.batch, self.slots, DTYPE))
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes
        )

    def _rows(self, tree: Any) -> Any:
        """Arrays with a value per row, or with none, such as the ids that end a text."""

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            rows = leaf.ndim > 0 and leaf.shape[0] == self.batch
            where = row_sharding(self.batch, self.mesh) if rows else NamedSharding(self.mesh, P())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(place, tree)

    def _state(self, call: Call) -> DecodeState:
        def start(*arrays: Any) -> DecodeState:
            weights, request, prompt, length = arrays
            return session.start(
                call._replace(weights=weights, request=request, prompt=prompt, prompt_length=length)
            )

        state = jax.eval_shape(start, call.weights, call.request, call.prompt, call.prompt_length)
        caches = {
            "target_cache": self._cache(self.target),
            "draft_cache": self._cache(self.head.block) if state.draft_cache else (),
        }
        return dataclasses.replace(self._rows(state), **caches)

    def _call(self, tree: AnyTree) -> Call:
        weights = self._weights()
        model = Model(self.target, weights.target, self.head, weights.draft, None, ())
        prompts = [[0] * self.chunk] * self.batch
        call = prepare(model, prompts, tree, self.slots - self.chunk, 0.0, 1.0, 0, 0)
        if call.slots != self.slots:
            raise ValueError(f"{self.slots} slots are no bucket: the next one has {call.slots}")
        if self.slots % self.chunk:
            raise ValueError(f"a chunk of {self.chunk} does not divide {self.slots} slots")
        request, prompt, length = self._rows((call.request, call.prompt, call.prompt_length))
        return call._replace(request=request, prompt=prompt, prompt_length=length, chunk=self.chunk)


def streaming_product(mesh: Mesh) -> tuple[str, int]:
    """The program of a product of a few rows with 2 GiB of weights, and the bytes of those weights.

    Its result stays on the chip, as an LM head's does, so that reading is all there is to it.
    """

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.max(jax.lax.optimization_barrier(matmul(x, weight)), axis=-1)

    place = NamedSharding(mesh, P())
    rows, width, out = 8, 4096, 2**18
    shapes = [jax.ShapeDtypeStruct(s, DTYPE, sharding=place) for s in ((rows, width), (out, width))]
    return program_text(jax.jit(product).lower(*shapes).compile()), out * width * DTYPE.itemsize


def program_text(compiled: jax.stages.Compiled) -> str:
    """The text of a compiled program, in which the TPU compiler leaves its estimates.

    Raises:
      ValueError: the compiler is of another version than jaxlib, which then cannot read it.
    """
    try:
        text = compiled.as_text()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        text = None
    if text is None:
        versions = " and ".join(
            f"{p} {importlib.metadata.version(p)}" for p in ("jaxlib", "libtpu")
        )
        raise ValueError(f"{versions} do not understand each other: pip install 'jax[tpu]'")
    return text


def _norms_in_f32(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """As `load_target` has them."""
    dtype = jnp.float32 if path[-1].key == "scale" else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _bytes_per_chip(tree: Any) -> int:
    def size(leaf: jax.ShapeDtypeStruct) -> int:
        sharding = leaf.sharding
        assert isinstance(sharding, NamedSharding)
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))
