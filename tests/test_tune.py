"""Trees that fit the machine: simulated passes are real passes, the search, the file.

Times are never compared: only what is made of them.
"""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import rigs
from rigs import PROMPTS, SEED, rig_m, rig_o, rig_r
from tiny_chat import chain_model, cycle_table
from tiny_head import perfect_head

from clover_jax.tree import PLAIN, DynamicTree, Tree, parse_tree
from clover_jax.weights.source import CheckpointError
from infer import cli, generate, load, speculative_generate, step_times, tune
from infer.calibrate import count_passes, token_ranks
from infer.call import prepare
from infer.step_times import StepTimes
from infer.timing import machine
from infer.tree_search import acceptance, candidates, likely_paths
from infer.tuning import Choice, Tuning, auto_tree, read_tunings, write_tuning

NEW = 48


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("rig", [rig_r, rig_o])
def test_simulated_passes_are_real_passes(rig, setting):
    """Heads that copy (R), that know the text (O); a text that ends early."""
    model = rigs.with_eos(rig(), 20)
    trees = ["paper", "chain-5", [[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]], [[0]]]
    for row, prompt in enumerate(PROMPTS):
        said = generate(model, [prompt], NEW, seed=SEED + row, **setting).token_ids[0]
        values = (setting.get("temperature", 0.0), setting.get("top_p", 1.0))
        call = prepare(model, [prompt], Tree(((0,),)), NEW, *values, 0, SEED + row)
        ranks = token_ranks(call, said, depth=5, width=5)
        assert ranks.shape == (len(said) - 1, 5)
        assert ranks[-1].tolist()[1:] == [-1] * 4
        for tree in trees:
            fast = speculative_generate(model, [prompt], NEW, seed=SEED + row, tree=tree, **setting)
            assert fast.token_ids == [said]
            paths = frozenset(parse_tree(tree).paths)
            assert fast.stats.target_passes == [1 + count_passes(ranks, paths)]


def some_ranks() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [np.sort(rng.integers(-1, 3, size=(40, 3)), axis=1)[:, ::-1] for _ in range(2)]


def test_the_search_finds_the_best_of_all_trees():
    """Against every tree of up to three ranks and three levels."""
    ranks = some_ranks()
    rows = [tuple(row) for text in ranks for row in text.tolist()]

    def value(paths) -> int:  # tokens kept, over all roots
        return sum(path == row[: len(path)] for path in paths for row in rows)

    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    found = {
        (tree.size - 1, tree.depth): tree for tree in candidates(likely_paths(ranks), (1, 2, 3, 4))
    }
    for size in (1, 2, 3, 4):
        best = {}
        for chosen in itertools.combinations(every, size):
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
                depth = max(map(len, chosen))
                best[depth] = max(best.get(depth, 0), value(chosen))
        for depth in best:
            limited = max(v for d, v in best.items() if d <= depth)
            mine = [value(t.paths) for (n, d), t in found.items() if n == size and d <= depth]
            assert max(mine) == limited


def test_acceptance_by_depth_and_rank():
    ranks = [np.array([[0, 1, -1], [0, 0, 0], [1, -1, -1], [-1, -1, -1]])]
    found = acceptance(ranks, 2)
    assert found.tolist() == [[0.5, 0.25], [1 / 3, 1 / 3], [0.5, 0.0]]


def test_the_time_of_a_tree_is_pieced_together():
    times = StepTimes(passes={1: 10.0, 2: 20.0, 4: 24.0}, levels={1: 1.0, 2: 3.0})
    assert times.of(PLAIN) == 10.0
    assert times.of(parse_tree([[0], [1]])) == 22.0  # between two and four nodes
    assert times.of(parse_tree("chain-3")) == 26.0  # two further levels
    # Nodes [0] and [1] propose on the second level; six nodes are two beyond four.
    assert times.of(parse_tree([[0], [1], [0, 0], [1, 0], [0, 1]])) == 24.0 + 4.0 + 3.0


def tuning(**changes) -> Tuning:
    choices = [
        Choice(
            1, parse_tree([[0], [0, 0], [1]]), 50.0, 49.0, 30.0, 2.1, {1: 1.5, 2: 2.0}, {1: 0.5}
        ),
        Choice(16, PLAIN, 300.0, 299.0, 299.0, 1.0, {1: 9.0}, {}),
    ]
    fields = {
        "machine": machine(),
        "dtype": "float32",
        "temperature": 0.0,
        "draft_vocab_size": 8,
        "prompts": 3,
        "new_tokens": 99,
        "acceptance": [[0.5, 0.25]],
        "choices": choices,
    }
    return Tuning(**(fields | changes))


def test_tunings_are_kept_by_machine_and_dtype(tmp_path):
    ours, other = tuning(), tuning(machine="TPU v6e")
    write_tuning(tmp_path, other)
    write_tuning(tmp_path, tuning(prompts=7))
    write_tuning(tmp_path, ours)
    assert read_tunings(tmp_path) == [other, ours]
    assert auto_tree([other, ours], "float32", 2).paths == ((0,), (1,), (0, 0))
    assert auto_tree([other, ours], "float32", 12) == PLAIN
    four_nodes = parse_tree([[0], [1], [0, 0], [0, 0, 0]])
    assert auto_tree([other, ours], "bfloat16", 1) == four_nodes
    assert auto_tree([], "float32", 1) == auto_tree([other], "float32", 1) == four_nodes


def test_a_tuning_holds_for_about_as_many_rows():
    measured = tuning()
    one, sixteen = measured.choices
    # Far from what was measured, a CPU with more than two rows decodes plainly.
    assert auto_tree([], "float32", 2) != PLAIN
    assert auto_tree([], "float32", 3) == PLAIN
    one_alone = dataclasses.replace(measured, choices=[one])
    assert auto_tree([one_alone], "float32", 2) == one.tree
    assert auto_tree([one_alone], "float32", 3) == PLAIN
    # Beyond a size at which plain decoding was faster it is faster still; below, who knows.
    tree_at_eight = dataclasses.replace(one, batch_size=8)
    both = dataclasses.replace(measured, choices=[tree_at_eight, sixteen])
    assert auto_tree([both], "float32", 4) == auto_tree([both], "float32", 11) == one.tree
    assert auto_tree([both], "float32", 200) == PLAIN
    sixteen_alone = dataclasses.replace(measured, choices=[sixteen])
    assert auto_tree([sixteen_alone], "float32", 1) == auto_tree([], "float32", 1)


def test_every_step_is_measured_in_the_same_cache_slots(monkeypatch):
    """A tree emits more tokens than plain decoding, but the slots decide what a pass costs."""
    slots = set()

    def spy(*arguments):
        call = prepare(*arguments)
        slots.add((call.slots, call.shape.tree == PLAIN))
        return call

    monkeypatch.setattr(step_times, "prepare", spy)
    monkeypatch.setattr(step_times, "_ROUNDS", 1)
    trees = [parse_tree("chain-1"), parse_tree("chain-5")]
    setting = step_times.Setting(rig_m(), [1] * 30, 1, 0.0, 8)
    times = step_times.with_trees(StepTimes({1: 1.0}, {}), setting, trees)
    assert slots == {(128, True), (128, False)}  # 30 tokens and 9 steps of up to 6
    assert times.trees.keys() == set(trees)
    assert times.of(trees[1]) == times.trees[trees[1]] > 0


@pytest.mark.parametrize("text", ["{", "[3]", '[{"machine": "a"}]', "{}x"])
def test_a_broken_tuning_is_refused_by_name(tmp_path, text):
    (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tuning\.json is not what python -m infer\.tune"):
        read_tunings(tmp_path)


def test_auto_is_what_was_tuned():
    model = dataclasses.replace(rig_m(), tunings=(tuning(),))
    found = speculative_generate(model, [[1]], 12)
    assert found.stats.tree.paths == ((0,), (1,), (0, 0))
    assert found.stats.tokens_per_pass > 1
    many = speculative_generate(model, [[1]] * 4, 12, num_samples=4, temperature=0.5)
    assert many.stats.tree == PLAIN
    assert many.stats.tokens_per_pass == 1
    named = speculative_generate(model, [[1]], 12, tree=DynamicTree(3, 3, 1))
    assert named.stats.tree == DynamicTree(3, 3, 1)


def test_the_command(tmp_path, capsys):
    """A head that knows its target: the longest chain takes the fewest passes."""
    target = chain_model(tmp_path / "target", cycle_table("abcdefghij"))
    head = perfect_head(target, tmp_path / "head")
    prompts = [
        {"question_id": n, "task": "t", "turns": [text]} for n, text in enumerate(["hello", "a"])
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    argv = ["--target", target, "--draft", head, "--prompts", tmp_path / "prompts.jsonl"]
    argv += ["--max_new_tokens", "16", "--batch_sizes", "2", "--max_nodes", "8"]
    status = cli.run(tune.main, [str(word) for word in argv])
    output, errors = capsys.readouterr()
    assert status == 0, errors
    assert output.splitlines()[-1] == f"written to {head / 'tuning.json'}"
    model = load(target=target, draft=head)
    (found,) = model.tunings
    assert [choice.batch_size for choice in found.choices] == [2]
    assert found.machine == machine()
    assert sorted(found.choices[0].pass_milliseconds) == [1, 2, 3, 4, 5, 7]
    assert sorted(found.choices[0].level_milliseconds) == [1]
    assert found.acceptance[0][0] > 0.9
    assert found.new_tokens == 22
    for choice in found.choices:
        assert choice.measured >= choice.plain > 0
        assert choice.predicted > 0
        assert speculative_generate(model, ["a"] * choice.batch_size, 4).stats.tree == choice.tree


def test_a_batch_takes_as_many_steps_as_its_longest_row():
    ranks = [np.zeros((6, 3), int), np.full((6, 3), -1), np.zeros((2, 3), int)]
    for text in ranks:  # the text ends: nothing to accept beyond
        for row in range(len(text)):
            text[row, len(text) - 1 - row :] = -1
    calibration = tune.Calibration([], [], ranks)
    times = StepTimes(passes={1: 1.0, 2: 2.0}, levels={1: 0.5})
    chain = parse_tree("chain-3")  # a step takes 2 + 2 levels * 0.5 (and no more for more nodes)
    # Passes: 2 (4 tokens, then 2), 6, 1; plainly 6, 6, 2.
    assert tune.predicted(calibration, chain, times, 1) == (14 / (9 * 3.0), 14 / 9)
    assert tune.predicted(calibration, chain, times, 2) == (8 / (7 * 3.0), 14 / 9)
    assert tune.predicted(calibration, PLAIN, times, 2) == (1.0, 1.0)
