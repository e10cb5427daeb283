"""Training from end to end on tiny models: what it learns, saves, resumes, refuses and exports."""

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_chat
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

from clover_jax.weights.clover import load_head
from clover_jax.weights.source import CheckpointError
from infer.engine import generate, speculative_generate
from infer.load import Model, load
from train import distill, packing
from train.checkpoint import Checkpoints
from train.config import DistillConfig
from train.data import Corpus, load_corpus, split
from train.loss import head_features, read_samples
from train.packing import pack
from train.records import DataError
from train.segments import Samples, positions
from train.step import TrainState, make_optimizer, read_target

ROOT = Path(__file__).resolve().parent.parent
CHATS = 60
CYCLE = "hgfedcba"


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory) -> Iterator[Path]:
    """Compiles each program once: the runs below share them, and compiling takes most of a run."""
    folder = tmp_path_factory.mktemp("compiled")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield folder


@dataclasses.dataclass
class Run:
    """A finished run."""

    config: DistillConfig
    printed: str
    model: Model  # the target it trained with
    losses: dict[int, float]  # of the steps that were logged

    @property
    def output(self) -> Path:
        return Path(self.config.output)

    @property
    def head(self) -> Path:
        return self.output / "head"


def run(config: DistillConfig) -> Run:
    """Trains in this process."""
    models: list[Model] = []
    losses: dict[int, float] = {}

    def remember(*args: Any, **kwargs: Any) -> Model:
        models.append(load(*args, **kwargs))
        return models[-1]

    report = distill.Meter.report

    def note(self: distill.Meter, step: int, metrics: dict[str, jax.Array]) -> None:
        losses[step] = float(metrics["loss"])
        report(self, step, metrics)

    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(distill, "load", remember)
        patch.setattr(distill.Meter, "report", note)
        assert distill.distill(config) == Path(config.output) / "head"
    return Run(config, printed.getvalue(), models[0], losses)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> DistillConfig:
    """A random target, chats of random letters, and about a dozen steps."""
    folder = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(0)
    chats = [
        (tiny_chat.random_text(rng, 3, 9), tiny_chat.random_text(rng, 8, 20)) for _ in range(CHATS)
    ]
    return DistillConfig(
        target=str(tiny_chat.random_model(folder / "target")),
        data=(tiny_chat.write_chats(folder / "chats.jsonl", chats),),
        output=str(folder / "straight"),
        eval_fraction=0.2,
        batch_size=2,
        epochs=1.2,
        num_layers=1,
        num_steps=3,
        draft_vocab=12,
        warmup_steps=2,
        log_every=1,
        eval_every=5,
        save_every=5,
        keep=9,
    )


@pytest.fixture(scope="module")
def straight(settings) -> Run:
    """A run that was not stopped."""
    return run(settings)


@pytest.fixture
def training_set(settings) -> Corpus:
    corpus, _ = load_corpus(settings.data, tiny_chat.tokenizer(), settings.max_length)
    return split(corpus, settings.eval_fraction)[0]


@pytest.fixture
def total(settings, training_set) -> int:
    """Steps of a run."""
    return round(settings.epochs * len(pack(training_set)) / settings.batch_size)


def steps_of(run_: Run) -> list[int]:
    folders = (run_.output / "checkpoints").iterdir()
    return sorted(int(folder.name) for folder in folders if folder.name.isdigit())


def saved(run_: Run, step: int) -> Any:
    """The arrays of a checkpoint, as they lie there."""
    folder = run_.output / "checkpoints" / str(step) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.absolute())


def assert_same_result(one: Run, other: Run) -> None:
    """Bitwise: parameters, optimizer, step, and the exported files."""
    last = steps_of(one)[-1]
    assert steps_of(other)[-1] == last
    jax.tree.map(np.testing.assert_array_equal, saved(one, last), saved(other, last))
    name = "model.safetensors"
    assert (one.head / name).read_bytes() == (other.head / name).read_bytes()


def digest(params: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


# What a run leaves


def test_what_a_run_prints(straight: Run, training_set: Corpus, total: int) -> None:
    printed, held_back = straight.printed, CHATS - len(training_set)
    rows = pack(training_set)
    assert f"{CHATS} records read, {CHATS} kept" in printed
    assert f"{len(training_set)} conversations" in printed
    assert f"{held_back} held back" in printed
    padding = 100 - 100 * len(training_set.ids) / (64 * len(rows))
    assert f"{len(rows)} rows of 64 tokens, {padding:.1f}% padding; {total} steps\n" in printed
    assert re.search(r"loss \d+\.\d{3}, accuracy \d+ \d+ \d+ %, [\d,]+ tokens/s", printed)
    assert re.findall(r"step (\d+): held-back loss", printed) == ["5", "10", str(total)]
    assert f"{total}/{total} [" in printed  # the bar arrived
    last = printed.splitlines()[-2:]
    assert re.fullmatch(r"copy bias by length of the match:( -?\d+\.\d){8}", last[0])
    assert last[1] == f"head exported to {straight.head}"


def test_metrics_for_tensorboard(straight: Run) -> None:
    (events,) = (straight.output / "tensorboard").iterdir()
    written = events.read_bytes()
    for tag in ("train/loss", "train/accuracy_2", "train/learning_rate", "train/tokens_per_second"):
        assert tag.encode() in written
    for tag in ("eval/loss", "eval/accuracy_0", "eval/loss_ce_2"):
        assert tag.encode() in written


def test_the_last_step_is_saved(straight: Run, total: int) -> None:
    assert steps_of(straight) == [5, 10, total]
    assert 10 < total < 15


def test_a_checkpoint_holds_the_head_alone(straight: Run) -> None:
    """Parameters in f32, two moments of each, three counters; nothing of the target."""
    state = saved(straight, 5)
    assert state.keys() == {"step", "params", "opt_state"}
    wanted = load_head(straight.head, straight.model.config, jnp.dtype(jnp.float32)).params
    assert jax.tree.structure(state["params"]) == jax.tree.structure(wanted)
    parameters = jax.tree.leaves(state["params"])
    assert {leaf.dtype for leaf in parameters} == {jnp.dtype(jnp.float32)}
    size = sum(leaf.size for leaf in parameters)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 3 * size + 3


def test_the_target_stays_as_it_was(straight: Run, settings: DistillConfig) -> None:
    fresh = load(target=settings.target, dtype=settings.dtype)
    assert digest(straight.model.params) == digest(fresh.params)


def test_the_head_serves_its_target(straight: Run, settings: DistillConfig) -> None:
    model = load(target=settings.target, draft=straight.head)
    assert model.draft_config.num_steps == 3
    assert model.draft_config.block.num_layers == 1
    assert len(model.draft_config.copy_bias) == 8
    prompts = [[{"role": "user", "content": text}] for text in ("hello", "a", "what is 17")]
    settings_of_rows = {"max_new_tokens": 24, "temperature": [0.0, 0.7, 1.3], "seed": 3}
    plain = generate(model, prompts, **settings_of_rows)
    ours = speculative_generate(model, prompts, tree="chain-3", **settings_of_rows)
    assert ours.token_ids == plain.token_ids
    assert ours.texts == plain.texts


def test_the_head_is_refused_on_another_target(straight: Run, tmp_path: Path) -> None:
    other = tiny_chat.random_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="this head was trained for the target"):
        load(target=other, draft=straight.head)


def test_the_draft_vocabulary_is_what_is_supervised_most(
    straight: Run, training_set: Corpus
) -> None:
    ids = load_file(straight.head / "model.safetensors")["draft_vocab"]
    counts = Counter(training_set.ids[training_set.mask].tolist())
    assert ids.tolist() == sorted(range(tiny_chat.V), key=lambda i: (-counts[i], i))[:12]
    share = sum(counts[i] for i in ids) / counts.total()
    assert f"12 tokens covers {share:.2%} of the supervised tokens" in straight.printed


def test_a_draft_vocabulary_of_all_tokens_is_none() -> None:
    corpus = Corpus.from_samples([(np.array([4, 4, 5, 5, 5, 6], np.int32), np.arange(6) != 4)])
    choose = distill.choose_draft_vocabulary
    assert choose(DistillConfig(draft_vocab=0), corpus, 9) is None
    assert choose(DistillConfig(draft_vocab=9), corpus, 9) is None
    # 4 and 5 twice each: one 5 is not supervised.
    assert choose(DistillConfig(draft_vocab=3), corpus, 9).tolist() == [4, 5, 6]


def test_a_draft_vocabulary_from_a_file(tmp_path: Path) -> None:
    corpus = Corpus.from_samples([(np.array([4, 4, 5, 5, 5, 6], np.int32), np.arange(6) != 4)])
    (tmp_path / "ids.txt").write_text("6\n1\n")
    config = DistillConfig(draft_vocab_file=str(tmp_path / "ids.txt"))
    assert distill.choose_draft_vocabulary(config, corpus, 9).tolist() == [6, 1]
    with pytest.raises(ValueError, match="two ways to say one thing"):
        dataclasses.replace(config, draft_vocab=3)


# Resuming


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C when the batch of this step is asked for."""
    batch_at = packing.Batches.batch_at

    def interrupted(self: packing.Batches, index: int) -> packing.Batch:
        if index == step:
            raise KeyboardInterrupt
        return batch_at(self, index)

    monkeypatch.setattr(packing.Batches, "batch_at", interrupted)


def test_resuming_is_exact(
    straight: Run, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at step 8 after a save at 5, and other moments to save and to evaluate later."""
    config = dataclasses.replace(settings, output=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    assert not (tmp_path / "run" / "head").exists()
    # What a save leaves that did not come to its end.
    (tmp_path / "run" / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()

    resumed = run(dataclasses.replace(config, save_every=100, eval_every=100, log_every=4))
    assert not list(tmp_path.glob("run/checkpoints/*tmp*"))
    assert f"resumed at step 5 of {steps_of(straight)[-1]}\n" in resumed.printed
    assert_same_result(resumed, straight)


def test_a_killed_run_resumes_exactly(
    straight: Run, settings: DistillConfig, tmp_path: Path, compiled: Path
) -> None:
    """kill -9 somewhere between two saves or inside one."""
    config = dataclasses.replace(settings, output=str(tmp_path / "run"), save_every=1)
    options = [
        word
        for field in dataclasses.fields(config)
        for word in (f"--{field.name}", *_words(getattr(config, field.name)))
    ]
    process = subprocess.Popen(
        [sys.executable, ROOT / "train" / "distill.py", *options],
        cwd=tmp_path,
        env=os.environ
        | {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "checkpoints" / "3").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL  # not at its end yet
    assert not (tmp_path / "run" / "head").exists()

    resumed = run(config)
    assert re.search(r"resumed at step [3-9] of", resumed.printed)
    assert_same_result(resumed, straight)


def _words(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, tuple) else [str(value)]


def test_cached_features_teach_the_same(
    straight: Run, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to bf16, and resumed: the second run reads the states that the first one wrote."""
    config = dataclasses.replace(settings, features="cached", output=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    states = tmp_path / "run" / "features" / "states.bfloat16"
    written = states.stat()
    resumed = run(config)
    assert "resumed at step 5 of" in resumed.printed
    assert states.stat().st_mtime_ns == written.st_mtime_ns

    last = steps_of(straight)[-1]
    assert sorted(resumed.losses) == list(range(6, last + 1))
    for step, loss in resumed.losses.items():
        assert loss == pytest.approx(straight.losses[step], rel=3e-4), step

    def distance(one: Any, other: Any) -> float:
        squares = jax.tree.map(lambda x, y: np.sum(np.square(x - y)), one, other)
        return sum(jax.tree.leaves(squares)) ** 0.5

    begun, online = (saved(straight, step)["params"] for step in (5, last))
    assert distance(saved(resumed, last)["params"], online) < 0.05 * distance(begun, online)
    ours, its = (load_file(r.head / "model.safetensors") for r in (resumed, straight))
    assert ours.keys() == its.keys()
    for name, tensor in its.items():
        one, other = (x.astype(np.float32) for x in (ours[name], tensor))
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-3, err_msg=name)


def test_a_finished_run_only_exports(straight: Run, settings: DistillConfig) -> None:
    before = (straight.head / "model.safetensors").read_bytes()
    shutil.rmtree(straight.head)
    again = run(settings)
    last = steps_of(straight)[-1]
    assert f"resumed at step {last} of {last}\n" in again.printed
    assert (again.head / "model.safetensors").read_bytes() == before


def test_other_settings_are_refused(straight: Run, settings: DistillConfig) -> None:
    other = dataclasses.replace(settings, learning_rate=0.5, seed=1)
    message = (
        f"^{re.escape(settings.output)}/checkpoints holds a run with other settings "
        r"\(learning_rate 0.001 -> 0.5, seed 0 -> 1\); choose another folder or the same settings$"
    )
    with pytest.raises(ValueError, match=message):
        run(other)


def test_other_data_are_refused(
    straight: Run, settings: DistillConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same paths with as many samples, one of which has changed."""
    corpus, report = load_corpus(settings.data, tiny_chat.tokenizer(), settings.max_length)
    corpus.mask[-1] = False
    monkeypatch.setattr(distill, "load_corpus", lambda *_: (corpus, report))
    with pytest.raises(ValueError, match=r"other settings \(corpus '\w+' -> '\w+'\)"):
        run(settings)


def test_another_target_is_refused(
    straight: Run, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same path with other weights in it."""
    other = load(target=tiny_chat.random_model(tmp_path / "other", seed=1))
    monkeypatch.setattr(distill, "load_target_model", lambda _: other)
    with pytest.raises(ValueError, match=r"other settings \(target_fingerprint '\w+' -> '\w+'\)"):
        distill.distill(settings)


def test_checkpoints_are_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder, the last two steps, each saved once, and exactly what was saved."""
    monkeypatch.chdir(tmp_path)
    optimizer, _ = make_optimizer(1e-3, 10, 2, 0.1, 1.0)

    def state(step: int) -> TrainState:
        params = {"weight": jnp.full((3, 2), step / 3), "scale": jnp.arange(2.0) + step}
        return TrainState(jnp.int32(step), params, optimizer.init(params))

    settings = {"rate": 0.1, "data": ["a", "b"], "name": None}
    with Checkpoints(Path("some/run"), keep=2) as checkpoints:
        assert checkpoints.restore(state(0), settings) is None
        for step in (1, 2, 4, 4):
            checkpoints.save(state(step), settings)
    with Checkpoints(Path("some/run"), keep=2) as checkpoints:
        restored = checkpoints.restore(state(0), settings)
        jax.tree.map(np.testing.assert_array_equal, restored, state(4))
        assert jax.tree.structure(restored) == jax.tree.structure(state(4))
        with pytest.raises(ValueError, match=r"some/run .* \(name None -> 'x', new None -> 1\)"):
            checkpoints.restore(state(0), settings | {"name": "x", "new": 1})
    assert sorted(folder.name for folder in Path("some/run").iterdir()) == ["2", "4"]


# Going on from a head


def test_going_on_from_a_head(straight: Run, settings: DistillConfig, tmp_path: Path) -> None:
    """At a rate of almost zero it comes out as it went in."""
    config = dataclasses.replace(
        settings,
        init=str(straight.head),
        output=str(tmp_path / "run"),
        learning_rate=1e-12,
        epochs=0.2,
        copy_length=0,
    )
    again = run(config)
    assert "copy bias" not in again.printed
    assert load(target=settings.target, draft=again.head).draft_config.copy_bias == ()
    one, other = (load_file(r.head / "model.safetensors") for r in (straight, again))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


def test_a_head_of_another_shape_is_refused(straight: Run, settings: DistillConfig) -> None:
    config = dataclasses.replace(settings, init=str(straight.head), num_layers=2)
    with pytest.raises(ValueError, match=r"has num_layers 1, the run 2$"):
        distill.read_start(config, straight.model)


def test_a_head_of_another_target_is_refused_as_a_start(
    straight: Run, settings: DistillConfig, tmp_path: Path
) -> None:
    other = load(target=tiny_chat.random_model(tmp_path / "other", seed=1))
    config = dataclasses.replace(settings, init=str(straight.head))
    with pytest.raises(CheckpointError, match="this head was trained for the target"):
        distill.read_start(config, other)


# What it learns


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory) -> Run:
    """Every answer is CYCLE, and the target says so too."""
    folder = tmp_path_factory.mktemp("chain")
    rng = np.random.default_rng(0)
    chats = [(tiny_chat.random_text(rng, 3, 9), CYCLE) for _ in range(40)]
    return run(
        DistillConfig(
            target=str(tiny_chat.chain_model(folder / "target", tiny_chat.cycle_table(CYCLE))),
            data=(tiny_chat.write_chats(folder / "chats.jsonl", chats),),
            output=str(folder / "run"),
            eval_fraction=0.2,
            batch_size=2,
            epochs=24.0,
            num_layers=1,
            learning_rate=1e-2,
            warmup_steps=10,
            dtype="float32",
            log_every=50,
            eval_every=20,
            save_every=1000,
        )
    )


def test_the_loss_falls(overfitted: Run) -> None:
    losses = [float(x) for x in re.findall(r"held-back loss ([\d.]+)", overfitted.printed)]
    assert losses[-1] < 0.7 * losses[0]
    assert "accuracy by head 100 100 100 100 100 %\n" in overfitted.printed


def test_every_head_learns_every_place_of_an_answer(overfitted: Run) -> None:
    """Head i at t says token t+2+i: the first three of an answer, its last, and its end."""
    model = overfitted.model
    head = load_head(overfitted.head, model.config, jnp.dtype(jnp.float32))
    user = tiny_chat.random_text(np.random.default_rng(0), 3, 9)  # the first of the run
    tokens = [tiny_chat.USER, *tiny_chat.ids(user), tiny_chat.END, tiny_chat.BOT]
    first = len(tokens)
    tokens = np.array([[*tokens, *tiny_chat.ids(CYCLE), tiny_chat.END]])
    samples = Samples(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, np.int32))
    hidden = read_target(model.config, model.params, samples)
    # x_{t+2}, x_{t+3}, ..; what comes round at the end is not looked at.
    drafted = np.stack([np.roll(tokens[0], -2 - i) for i in range(4)])

    @jax.jit
    def features_of(params: Any, embedding: jax.Array) -> jax.Array:
        (state,) = read_samples(head.config, params, hidden, embedding, samples)
        return head_features(head.config, params, state, embedding[drafted])

    features = features_of(head.params, model.params["embed_tokens"])
    said = np.argmax(features @ model.params["lm_head"].T, axis=-1)  # [I, T]
    for i in range(5):
        answer = [said[i, q - 2 - i] for q in range(first, tokens.shape[1])]
        assert answer == tokens[0, first:].tolist(), f"head {i}"


def test_decoding_accepts_what_was_learned(overfitted: Run) -> None:
    """The prompt's pass gives h, the next one six tokens and the last one the rest."""
    model = load(target=overfitted.config.target, draft=overfitted.head)
    prompt = [{"role": "user", "content": "new words"}]
    said = speculative_generate(model, prompt, 24, tree="chain-5")
    assert said.texts == [CYCLE]
    assert said.finish_reasons == ["eos"]
    assert said.stats.target_passes == [3]


# Evaluation


def test_evaluation_weighs_every_sample_right() -> None:
    """Samples of unequal length, packed, in batches of two rows: the same as all at once."""
    rng = np.random.default_rng(0)
    samples = [
        (rng.integers(0, 50, n).astype(np.int32), rng.random(n) < 0.5)
        for n in (3, 9, 4, 17, 5, 60, 4, 8, 33, 7)
    ]
    rows = pack(Corpus.from_samples(samples))
    assert len(rows) % 2
    batches: list[int] = []

    def evaluate(_: Any, __: Any, batch: Samples) -> Any:
        """As batch_loss: means over what each head counts; head 1 counts less."""
        batches.append(len(batch.tokens))
        counted = np.stack([batch.mask, batch.mask & (np.asarray(positions(batch.segments)) >= 5)])
        count = counted.sum(axis=(1, 2)).astype(np.float32)
        mean = np.where(counted, batch.tokens, 0).sum(axis=(1, 2)) / np.maximum(count, 1)
        terms = {"loss_hidden": mean, "loss_ce": 2 * mean, "accuracy": 3 * mean}
        return np.float32(0), terms | {"count": count}

    config = DistillConfig(batch_size=2, head_decay=0.5, hidden_weight=3.0, ce_weight=1.0)
    found = distill.evaluation(config, evaluate, None, None, rows)
    means = [
        np.mean(np.concatenate([ids[start:][mask[start:]] for ids, mask in samples]))
        for start in (0, 5)
    ]
    assert batches == [2] * ((len(rows) + 1) // 2)
    assert len(batches) > 1
    np.testing.assert_allclose(found["accuracy"], 3 * np.array(means), rtol=1e-6)
    np.testing.assert_allclose(found["loss"], 5 * (means[0] + 0.5 * means[1]), rtol=1e-6)


def test_nothing_held_back() -> None:
    nothing = pack(Corpus.from_samples([]))
    assert distill.evaluation(DistillConfig(), None, None, None, nothing) == {}


# The optimizer


def test_the_rate_warms_up_and_decays_to_zero() -> None:
    _, schedule = make_optimizer(0.5, 100, 10, 0.0, 1.0)
    rates = [float(schedule(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:11], np.arange(11) / 20, atol=1e-6)
    assert np.all(np.diff(rates[10:]) < 0)
    assert rates[100] == pytest.approx(0, abs=1e-7)
    for total in (1, 2, 5):  # shorter than the warm-up
        assert np.isfinite(
            [float(make_optimizer(0.5, total, 10, 0.0, 1.0)[1](s)) for s in (0, 4)]
        ).all()


def test_only_kernels_decay_and_gradients_are_clipped() -> None:
    optimizer, _ = make_optimizer(0.1, 10, 0, 0.5, 1.0)
    params = {name: jnp.full((2, 2), 3.0) for name in ("weight", "scale", "bias")}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["weight"], -0.1 * 0.5 * 3.0, rtol=1e-6)
    assert not np.any(updates["scale"])
    assert not np.any(updates["bias"])

    def moments(scale: float) -> list[np.ndarray]:
        gradients = jax.tree.map(lambda x: scale * jnp.ones_like(x), params)
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    for one, other in zip(moments(10.0), moments(1000.0), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert any(np.any(a != b) for a, b in zip(moments(0.01), moments(0.02), strict=True))


# What is refused


def test_fewer_rows_than_a_batch(settings: DistillConfig, training_set: Corpus) -> None:
    message = (
        f"^the training samples fill {len(pack(training_set))} rows of 64 tokens, "
        "fewer than one batch of 64$"
    )
    with pytest.raises(DataError, match=message):
        run(dataclasses.replace(settings, batch_size=64))


def test_nothing_to_hold_back(settings: DistillConfig, straight: Run) -> None:
    config = dataclasses.replace(settings, eval_fraction=1e-6)
    message = f"eval_fraction 1e-06 of {CHATS} conversations holds back none"
    with pytest.raises(ValueError, match=message):
        distill.read_data(config, straight.model)


def test_a_tokenizer_beyond_the_vocabulary(settings: DistillConfig, straight: Run) -> None:
    config = dataclasses.replace(straight.model.config, vocab_size=tiny_chat.V - 1)
    model = dataclasses.replace(straight.model, config=config)
    message = f"token id {tiny_chat.V - 1}, outside the target's vocabulary of {tiny_chat.V - 1}"
    with pytest.raises(ValueError, match=message):
        distill.read_data(settings, model)


def test_samples_end_with_the_context(settings: DistillConfig, straight: Run) -> None:
    config = dataclasses.replace(straight.model.config, max_position_embeddings=16)
    training, held_back = distill.read_data(
        settings, dataclasses.replace(straight.model, config=config)
    )
    assert max(training.longest(), held_back.longest()) == 16


def test_joined_rows_end_with_the_context_too(
    settings: DistillConfig, training_set: Corpus
) -> None:
    joined = dataclasses.replace(settings, join=True, max_length=100)
    assert distill.arrange(joined, training_set, context=1000).length == 100
    rows = distill.arrange(joined, training_set, context=80)
    assert rows.length == 80
    assert rows.segments.max() == 1
    assert distill.arrange(settings, training_set, context=80).segments.max() > 1


def test_a_target_without_tokenizer(settings: DistillConfig, tmp_path: Path) -> None:
    folder = tiny_chat.random_model(tmp_path / "target")
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="has no tokenizer, which training data needs"):
        distill.distill(dataclasses.replace(settings, target=str(folder)))


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--config", "no.py"], 1, "error: config no.py does not exist"),
        (["--target", "{target}"], 1, "error: no training data; give --data files"),
        (
            ["--target", "{target}", "--data", "no.jsonl"],
            1,
            "error: no training data at no.jsonl: no such file, and no file matches it",
        ),
        (["--target", "./no"], 1, "error: ./no does not exist"),
        (["--learningrate", "1"], 2, "error: unrecognized arguments: --learningrate 1 "),
    ],
)
def test_one_line_says_what_is_wrong(
    argv: list[str], code: int, message: str, settings: DistillConfig, tmp_path: Path
) -> None:
    """As a user sees it: no traceback, nothing else on stderr."""
    command = [sys.executable, ROOT / "train" / "distill.py"]
    done = subprocess.run(
        [*command, *(word.format(target=settings.target) for word in argv)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
