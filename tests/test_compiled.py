"""What is compiled, how often, and what the compiled decode loop must not hold.

Axes: B rows, S cache slots.
"""

import dataclasses
import logging
import math
import re

import byte_tokenizers
import jax
import jax.numpy as jnp
import pytest
import rigs
from rigs import NEW, PROMPTS, rig_m, rig_r, with_eos

from clover_jax.tree import parse_tree
from infer import generate, session, speculative_generate, stream
from infer.call import Call, prepare


@pytest.fixture
def compiled(caplog):
    """A function that says what has been compiled since it was last asked, eager operations too."""
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        yield lambda: take(caplog)


def take(caplog) -> list[str]:
    found = [r.getMessage() for r in caplog.records]
    caplog.clear()
    return [m.partition(" with ")[0] for m in found if m.startswith("Compiling")]


def test_one_executable_per_bucket(compiled):
    def variations(call) -> None:
        call(rig_m(), PROMPTS, NEW)
        call(rig_m(), PROMPTS, NEW, temperature=0.7, top_p=0.9, top_k=5, seed=4)
        call(rig_r(), PROMPTS, NEW, temperature=[0.0, 1.0, 0.5, 2.0], seed=[9, 8, 7, 6])
        call(rig_r(), PROMPTS, [NEW, 0, 1, 50], top_k=[0, 1, 2, 3], top_p=[1.0, 0.1, 0.2, 0.3])
        call(rig_m(), [[1] * 16, [2], [3] * 9, [4] * 2], NEW)  # as long as the chunk
        call(with_eos(rig_m(), 7), PROMPTS, NEW)
        call(with_eos(rig_m(), *range(8)), PROMPTS, NEW)

    def speculative(*args, **settings) -> None:
        speculative_generate(*args, tree="chain-7", **settings)

    # What comes first in a bucket may compile, the models' own set-up included.
    for model in (rig_m(), rig_r()):
        generate(model, PROMPTS, NEW)
        speculative(model, PROMPTS, NEW)
    compiled()
    sizes = session._prefill._cache_size(), session._decode._cache_size()
    variations(generate)
    variations(speculative)
    assert compiled() == []
    assert (session._prefill._cache_size(), session._decode._cache_size()) == sizes

    speculative(rig_m(), PROMPTS, 65 + NEW)  # another bucket, as a check of this test
    assert len(compiled()) >= 2
    assert session._decode._cache_size() == sizes[1] + 1


def test_another_tree_shares_the_prefill(compiled):
    speculative_generate(rig_m(), PROMPTS, NEW, tree="chain-7")
    size = session._prefill._cache_size()
    speculative_generate(rig_m(), PROMPTS, NEW, tree="chain-3")
    assert session._prefill._cache_size() == size


def test_a_stream_compiles_nothing_on_its_way(compiled):
    model = dataclasses.replace(rig_m(), tokenizer=byte_tokenizers.byte_level())
    list(stream(model, [3], NEW, tree=None))
    compiled()
    for settings in ({"temperature": 0.8, "seed": 5}, {"top_p": 0.5, "temperature": 2.0}):
        list(stream(with_eos(model, 9), [4, 8], NEW - 1, tree=None, **settings))
    assert compiled() == []


# ---- the compiled loop

BATCH, SLOTS = 3, 101  # so that nothing else has as many elements as a cache
CACHE = BATCH * rigs.CONFIG.num_kv_heads * rigs.CONFIG.head_dim * SLOTS
NO_WORK = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call")
_OP = re.compile(r"%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def computations(text: str) -> dict[str, list[str]]:
    """Name -> instructions, of a compiled module's text."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            lines = found[head[1]] = []
        elif line.startswith("  "):
            lines.append(line.strip().removeprefix("ROOT "))
    return found


def called(line: str) -> list[str]:
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += [b.strip().lstrip("%") for b in branches.split(",")]
    return names


def elements(shape: str) -> list[int]:
    """Element counts of an array shape or of each array of a tuple."""
    return [
        math.prod(int(d) for d in dims.split(",") if d)
        for dims in re.findall(r"\w+\[([\d,]*)\]", shape)
    ]


def cache_sized_work(text: str) -> list[str]:
    """Instructions in a `while` body, or in what it calls, that write a whole cache.

    An update in place writes its update alone: scatter, dynamic-update-slice, or a fusion that ends
    in one.
    """
    found = computations(text)
    bodies = [
        b for lines in found.values() for x in lines for b in re.findall(r"body=%?([\w.\-]+)", x)
    ]
    todo, seen, work = bodies, set(), []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in found[name]:
            op = _OP.match(line)
            assert op, line
            _, shape, kind, _ = op.groups()
            if kind == "fusion":
                if CACHE in elements(shape) and not _updates_in_place(found, called(line)[0]):
                    work.append(line)
                continue
            todo += called(line)
            in_place = kind in ("scatter", "dynamic-update-slice", *NO_WORK)
            if CACHE in elements(shape) and not in_place:
                work.append(line)
    assert seen, "no loop in this program"
    return work


def _updates_in_place(found: dict[str, list[str]], fusion: str) -> bool:
    kinds = [_OP.match(line)[3] for line in found[fusion] if CACHE in elements(_OP.match(line)[2])]
    writes = [k for k in kinds if k not in NO_WORK]
    return set(writes) <= {"scatter", "dynamic-update-slice"}


@pytest.fixture(scope="module")
def odd_call() -> Call:
    # Five nodes: the scores [B, K, nodes * G, S] then have another size than a cache [B, K, H, S].
    call = prepare(rig_r(), PROMPTS[:BATCH], parse_tree("chain-4"), 8, 0.7, 0.9, 0, 0)
    return call._replace(slots=SLOTS)


def test_the_decode_loop_copies_no_cache(odd_call):
    call = odd_call
    state = jax.eval_shape(lambda: session.start(call))
    compiled = session._decode.lower(
        call.shape, call.weights, call.request, state, jnp.int32(5)
    ).compile()
    assert cache_sized_work(compiled.as_text()) == []
    # The caches, two arrays a layer, stay where they were before the call.
    layers = rigs.CONFIG.num_layers + call.shape.draft.block.num_layers
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * layers * CACHE * 4


def test_the_prefill_loop_copies_no_cache(odd_call):
    call = odd_call
    compiled = session._prefill.lower(
        call.shape.target,
        call.shape.draft,
        call.weights,
        call.request,
        call.prompt,
        call.prompt_length,
        slots=call.slots,
        chunk=call.chunk,
        samples=call.samples,
    ).compile()
    assert cache_sized_work(compiled.as_text()) == []


@pytest.mark.parametrize("bad", ["scan", "where"])
def test_the_detector_sees_copies(bad):
    """Loops that are known to copy: a cache that is scanned over, and one that is selected."""
    layers = 2
    shape = (layers, BATCH, rigs.CONFIG.num_kv_heads, SLOTS, rigs.CONFIG.head_dim)

    def scanned(step, cache):
        def layer(x, held):
            held = held.at[:, :, step].set(x, mode="drop")
            return x + held.sum(axis=2), held

        return jax.lax.scan(layer, jnp.ones(shape[1:3] + shape[4:]), cache)[1]

    def selected(step, cache):
        at = (jnp.arange(SLOTS) == step)[:, None]
        return [jnp.where(at, c.sum(axis=2, keepdims=True), c) for c in cache]

    one = {"scan": scanned, "where": selected}[bad]
    cache = jax.ShapeDtypeStruct(shape, jnp.float32)
    if bad == "where":
        cache = [jax.ShapeDtypeStruct(shape[1:], jnp.float32)] * layers

    def loop(cache, steps):
        return jax.lax.fori_loop(0, steps, one, cache)

    text = jax.jit(loop, donate_argnums=0).lower(cache, jnp.int32(3)).compile().as_text()
    assert cache_sized_work(text) != []
