"""Distils a Clover-2 head from a frozen target.

    python train/distill.py --config configs/smollm2_135m.py [--option value ...]

Conversations become token ids with a mask of the assistant turns; the frozen target and the head
run in one compiled step; orbax keeps head, optimizer and step, and the same command resumes from
the last checkpoint; at the end the head is exported to OUTPUT/head.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from clover_jax.config import DraftConfig
from clover_jax.draft_vocab import read_draft_vocab
from clover_jax.target import lm_head
from clover_jax.weights.clover import Head, check_target, load_head, save_head
from clover_jax.weights.fingerprint import fingerprint
from infer.cli import Parser, run
from infer.load import Model, load
from train.checkpoint import Checkpoints
from train.config import DistillConfig
from train.copy_bias import copy_cases, fit_bias
from train.data import Corpus, load_corpus, split, token_frequencies
from train.features import cached_hidden
from train.initialize import initialize_head
from train.loss import LossWeights, Vocabulary, total_loss
from train.metrics import Meter, report_evaluation
from train.options import build, load_config, options_parser
from train.packing import Batch, Batches, Rows, batches_in_order, pack
from train.step import (
    Frozen,
    Recipe,
    TrainState,
    batch_loss,
    make_optimizer,
    read_target,
    train_step,
)

_COPY_BATCHES = 64  # enough for a few numbers

compiled_read = jax.jit(read_target, static_argnums=0)
compiled_cases = jax.jit(copy_cases, static_argnums=(0, 1))


def distill(config: DistillConfig) -> Path:
    """Trains and exports a head; returns its folder."""
    model = load_target_model(config)
    corpus, held_back = read_data(config, model)
    start = read_start(config, model)
    if start is not None:
        draft, draft_ids = start.config, start.draft_ids
    else:
        draft_ids = choose_draft_vocabulary(config, corpus, model.config.vocab_size)
        size = None if draft_ids is None else len(draft_ids)
        draft = DraftConfig.for_target(model.config, config.num_layers, size)
        draft = dataclasses.replace(draft, num_steps=config.num_steps)
    recipe = Recipe(
        target=model.config,
        draft=draft,
        loss=loss_weights(config),
        compute_dtype=config.dtype,
    )
    frozen = freeze(recipe, model, draft_ids)

    context = model.config.max_position_embeddings
    rows, held_back_rows = (arrange(config, c, context) for c in (corpus, held_back))
    batches = Batches(rows, config.batch_size, config.seed)
    total = max(round(config.epochs * len(rows) / config.batch_size), 1)
    print(f"{len(rows)} rows of {rows.length} tokens, {rows.padding():.1%} padding; {total} steps")
    optimizer, schedule = make_optimizer(
        config.learning_rate, total, config.warmup_steps, config.weight_decay, config.clip_norm
    )
    step = jax.jit(functools.partial(train_step, recipe, optimizer), donate_argnums=0)
    evaluate = jax.jit(functools.partial(batch_loss, recipe))

    output = Path(config.output)
    target_print = fingerprint(model.config, model.params)
    data_identity = {"corpus": corpus.digest(), "target_fingerprint": target_print}
    identity = config.fixed() | data_identity
    with (
        Checkpoints(output / "checkpoints", config.keep) as checkpoints,
        SummaryWriter(str(output / "tensorboard")) as writer,
    ):
        params = (
            start.params
            if start is not None
            else new_head(config.seed, recipe, frozen, batches.batch_at(0))
        )
        state = TrainState(jnp.int32(0), params, optimizer.init(params))
        state = checkpoints.restore(state, identity) or state
        states = read_ahead(config, recipe, frozen, rows, output / "features", data_identity)
        first = int(state.step)
        if first:
            print(f"resumed at step {first} of {total}")
        bar = tqdm(total=total, initial=first, unit="step", smoothing=0.05, dynamic_ncols=True)
        meter = Meter(bar, writer, schedule)
        for index in range(first, total):
            batch = batches.batch_at(index)
            hidden = None if states is None else states[batch.row_ids]
            state, metrics = step(state, frozen, batch.samples, hidden)
            meter.count(batch)
            if (index + 1) % config.log_every == 0 or index + 1 == total:
                meter.report(index + 1, metrics)
            if (index + 1) % config.eval_every == 0 or index + 1 == total:
                values = evaluation(config, evaluate, state.params, frozen, held_back_rows)
                report_evaluation(values, writer, index + 1)
                meter.restart()
            if (index + 1) % config.save_every == 0 or index + 1 == total:
                checkpoints.save(state, identity)
        bar.close()

    bias = find_copy_bias(config, recipe, state.params, frozen, held_back_rows, rows)
    folder = output / "head"
    head = Head(
        config=dataclasses.replace(draft, copy_bias=bias),
        params=jax.device_get(state.params),
        draft_ids=draft_ids,
        target_fingerprint=target_print,
        metadata={
            "recipe": config.fixed(),
            "samples": len(corpus),
            "tokens": len(corpus.ids),
            "steps": total,
        },
        decay_coefficient=config.head_decay,
    )
    save_head(folder, head, jnp.bfloat16)
    print(f"head exported to {folder}")
    return folder


def loss_weights(config: DistillConfig) -> LossWeights:
    """The weights of the loss terms."""
    return LossWeights(config.head_decay, config.hidden_weight, config.ce_weight)


def load_target_model(config: DistillConfig) -> Model:
    """The frozen target, its weights and activations in the run's dtype."""
    model = load(target=config.target, dtype=config.dtype)
    # On a CPU `load` keeps activations in float32, which generation wants and training need not.
    tokens = model.params["embed_tokens"].astype(config.dtype)
    model = dataclasses.replace(model, params=model.params | {"embed_tokens": tokens})
    if model.tokenizer is None:
        raise ValueError(f"{config.target} has no tokenizer, which training data needs")
    return model


def read_data(config: DistillConfig, model: Model) -> tuple[Corpus, Corpus]:
    """Conversations for training and for evaluation; says what was skipped and why."""
    if not config.data:
        raise ValueError("no training data; give --data files")
    context = model.config.max_position_embeddings
    corpus, report = load_corpus(config.data, model.tokenizer, min(config.max_length, context))
    print(report)
    if corpus.ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token id {corpus.ids.max()}, outside the target's vocabulary of "
            f"{model.config.vocab_size}"
        )
    training, held_back = split(corpus, config.eval_fraction)
    if config.eval_fraction > 0 and not len(held_back):
        raise ValueError(
            f"eval_fraction {config.eval_fraction} of {len(corpus)} conversations holds back none; "
            "raise it, or set it to 0"
        )
    print(
        f"{len(training)} conversations, {len(training.ids):,} tokens, "
        f"{int(training.mask.sum()):,} supervised; {len(held_back)} held back"
    )
    return training, held_back


def arrange(config: DistillConfig, corpus: Corpus, context: int) -> Rows:
    """The samples in rows, one after another or, if they are joined, as one long sample each."""
    if not config.join:
        return pack(corpus)
    return pack(corpus, min(config.max_length, context)).joined()


def choose_draft_vocabulary(
    config: DistillConfig, corpus: Corpus, vocab_size: int
) -> np.ndarray | None:
    """int32 [W], those of a file or the most frequent supervised tokens, most frequent first; None
    for all."""
    counts = token_frequencies(corpus, vocab_size)
    ids: np.ndarray | None = None
    if config.draft_vocab_file:
        ids = read_draft_vocab(Path(config.draft_vocab_file), vocab_size)
    elif 0 < config.draft_vocab < vocab_size:
        ids = np.argsort(-counts, kind="stable")[: config.draft_vocab].astype(np.int32)
    if ids is None:
        return None
    print(
        f"draft vocabulary of {len(ids)} tokens covers "
        f"{counts[ids].sum() / max(counts.sum(), 1):.2%} of the supervised tokens"
    )
    return ids


def read_start(config: DistillConfig, model: Model) -> Head | None:
    """The head that training goes on from, if one is named."""
    if not config.init:
        return None
    head = load_head(config.init, model.config, jnp.dtype("float32"), lm_head(model.params))
    check_target(head, model.config, model.params)
    its = {
        "num_layers": head.config.block.num_layers,
        "num_steps": head.config.num_steps,
        "draft_vocab": 0 if head.draft_ids is None else len(head.draft_ids),
    }
    for name, value in its.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"the head in {config.init} has {name} {value}, the run {getattr(config, name)}"
            )
    return head


def freeze(recipe: Recipe, model: Model, draft_ids: np.ndarray | None) -> Frozen:
    """What the step reads and never changes."""
    vocab_size = model.config.vocab_size
    ids = np.arange(vocab_size) if draft_ids is None else draft_ids
    row_of = np.full(vocab_size, -1, np.int32)
    row_of[ids] = np.arange(len(ids))
    rows, tokens = lm_head(model.params), model.params["embed_tokens"]
    vocabulary = Vocabulary(
        lm_rows=rows[ids].astype(recipe.compute_dtype),
        row_of=jnp.asarray(row_of),
        embedding=tokens if recipe.draft.embedding == "embed_tokens" else rows,
    )
    return Frozen(model.params, vocabulary)


def read_ahead(
    config: DistillConfig,
    recipe: Recipe,
    frozen: Frozen,
    rows: Rows,
    folder: Path,
    identity: dict[str, str],
) -> np.ndarray | None:
    """The target's hidden states of all rows if they are to be cached, [N, T, D]."""
    if config.features == "online":
        return None
    return cached_hidden(
        folder,
        identity | {"row_length": rows.length, "join": config.join, "dtype": config.dtype},
        rows,
        recipe.target.hidden_size,
        config.batch_size,
        functools.partial(compiled_read, recipe.target, frozen.target),
    )


def new_head(seed: int, recipe: Recipe, frozen: Frozen, batch: Batch) -> dict[str, Any]:
    """Parameters of a new head, scaled to the target's hidden states on one batch."""
    hidden = compiled_read(recipe.target, frozen.target, batch.samples)
    # The median: the first token's state is many times larger than any other.
    rms = jnp.sqrt(jnp.mean(jnp.square(hidden.astype(jnp.float32)), axis=-1))
    typical = float(np.median(np.asarray(rms)[batch.samples.segments > 0]))
    return initialize_head(recipe.draft, frozen.target, jax.random.key(seed), typical)


def evaluation(
    config: DistillConfig, evaluate: Any, params: Any, frozen: Frozen, held_back: Rows
) -> dict[str, Any]:
    """Loss and per-head means over all held-back samples; empty if there are none.

    Args:
      evaluate: (params, frozen, samples) -> loss and metrics of a batch, as batch_loss.
    """
    if not len(held_back):
        return {}
    sums: dict[str, Any] = {}
    for batch in batches_in_order(held_back, config.batch_size):
        _, metrics = jax.device_get(evaluate(params, frozen, batch.samples))
        count = metrics.pop("count")
        batch_sums = {name: mean * count for name, mean in metrics.items()} | {"count": count}
        sums = {name: total + sums.get(name, 0) for name, total in batch_sums.items()}
    count = np.maximum(sums.pop("count"), 1)
    means = {name: total / count for name, total in sums.items()}
    return means | {"loss": total_loss(loss_weights(config), means)}


def find_copy_bias(
    config: DistillConfig, recipe: Recipe, params: Any, frozen: Frozen, held_back: Rows, rows: Rows
) -> tuple[float, ...]:
    """`DraftConfig.copy_bias` for the head, from held-back samples or else from its own."""
    if not config.copy_length:
        return ()
    chosen = held_back if len(held_back) else rows
    head = lm_head(frozen.target)
    cases = []
    for batch in itertools.islice(batches_in_order(chosen, config.batch_size), _COPY_BATCHES):
        hidden = compiled_read(recipe.target, frozen.target, batch.samples)
        found = compiled_cases(
            recipe.draft, config.copy_length, params, hidden, frozen.vocabulary, head, batch.samples
        )
        cases.append([np.asarray(x).reshape(-1) for x in found])
    lead, right, length = (np.concatenate(x) for x in zip(*cases, strict=True))
    bias = fit_bias(lead, right, length, config.copy_length)
    print("copy bias by length of the match:", " ".join(f"{x:.1f}" for x in bias))
    return tuple(bias)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads --config and the options that override it."""
    chooser = Parser(add_help=False)
    chooser.add_argument("--config")
    chosen, _ = chooser.parse_known_args(argv)
    defaults = load_config(chosen.config, DistillConfig) if chosen.config else None
    parser = options_parser(
        "Distils a Clover-2 head from a frozen target.", DistillConfig, defaults
    )
    parser.add_argument("--config", help="a file of configs/; the other options override it")
    distill(build(DistillConfig, parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(run(main))
