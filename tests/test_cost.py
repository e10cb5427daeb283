"""What `python -m infer.cost` reads off a compiled program, and what it makes of it.

tpu_program.txt is cut out of programs that the TPU compiler made of the decode loop, one of each
kind of line.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest

from clover_jax.tree import PLAIN, parse_tree
from infer import cost
from infer.cost_figures import PARTS, Figures, Roof, decode_roofline
from infer.cost_programs import Programs, chips, program_text
from infer.cost_report import Case, as_json, text
from infer.program_cost import Cost
from infer.program_cost import cost as program_cost
from infer.program_text import arrays, parse, runs

PROGRAM = parse((Path(__file__).parent / "tpu_program.txt").read_text(encoding="utf-8"))
CACHE = 8 * 128 * 2048 * 2
RATE = 0.001  # cycles per byte


def of(branch: str, large: int = CACHE) -> Cost:
    return program_cost(PROGRAM, PROGRAM.loop(), PARTS, RATE, large, branch)


def named(name: str):
    return next(i for lines in PROGRAM.computations.values() for i in lines if i.name == name)


# ---- the text


def test_the_loop_is_that_of_the_entry():
    assert PROGRAM.entry == "main.0"
    assert PROGRAM.loop() == "step"


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(ValueError, match=r"^the program's entry main has no loop$"):
        parse("ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}").loop()
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing")


def test_an_instruction_is_read_whole():
    fusion = named("fusion.279")
    assert (fusion.kind, fusion.cycles, fusion.called) == ("fusion", 47496, ("fused_product",))
    assert fusion.operands == ("get-tuple-element.11", "get-tuple-element.9")
    assert fusion.op_name.endswith("q_proj/dot_general")
    assert named("conditional.15").called == ("region_identity", "region_top_p")
    assert named("gather.1").cycles is None  # the largest number there is stands for none
    assert named("custom-call.1").target == "ConcatBitcast"
    kernel = named("splash_mqa.20")  # over several lines
    assert (kernel.target, len(kernel.arrays)) == ("tpu_custom_call", 2)
    assert kernel.op_name.endswith("over_slots)/splash_mqa")


def test_shapes_say_where_they_lie():
    assert arrays("(f32[2,3]{1,0:T(8,128)S(1)}, bf16[4]{0}, u32[]{:S(2)}, pred[7])") == (
        ("f32", (2, 3), False),
        ("bf16", (4,), True),
        ("u32", (), False),
        ("pred", (7,), True),
    )
    assert [a.size for a in arrays("(f32[2,3]{1,0}, bf16[4], u32[], pred[7])")] == [24, 8, 4, 7]


def test_an_inner_loop_counts_as_often_as_it_runs():
    assert PROGRAM.trips(named("while.56")) == 32
    assert PROGRAM.trips(named("while.58")) == 1  # nothing in it says how often
    inside = [r for r in runs(PROGRAM, "step", "dearest", PARTS) if r.instruction.cycles == 8000]
    assert [(r.times, r.part) for r in inside] == [(32, "accept")]


def test_what_has_no_name_belongs_to_the_part_it_stands_in():
    parts = {r.instruction.name: r.part for r in runs(PROGRAM, "step", "cheapest", PARTS)}
    assert parts["convert.2"] == "verify"  # it has no op_name, and stands after a product of it
    assert parts["sort.30"] == "propose"
    assert parts["slice-start"] == ""


# ---- the cost


def test_cycles_by_part():
    greedy = of("cheapest").cycles
    assert greedy == {"verify": 47496 + 2000 + 45960 + 23280, "commit": 2115}
    assert of("dearest").cycles == greedy | {"accept": 32 * 8000}


def test_prefetches_advance_while_hbm_is_idle_and_are_waited_for():
    # Two of 4 and 8 MiB, at a thousandth of a cycle per byte. The product reads 32 MiB from HBM in
    # 47496 cycles, of which it needs 33554; the conversion after it reads none.
    prefetched = (2**22 + 2**23) * RATE
    idle = (47496 - 2**25 * RATE) + 2000
    assert prefetched > 0.7 * idle
    assert of("cheapest").waiting.get("verify", 0.0) == max(0.0, prefetched - idle)

    slower = program_cost(PROGRAM, "step", PARTS, 2 * RATE, CACHE, "cheapest")
    # At twice the price the product never pauses, and the conversion alone leaves HBM idle.
    assert slower.waiting["verify"] == pytest.approx(2 * prefetched - 2000)
    assert slower.total == pytest.approx(sum(slower.cycles.values()) + 2 * prefetched - 2000)


def test_copies_are_those_to_hbm_that_do_nothing_else():
    # Not the prefetch of the cache, nor the write of one slot, nor the copy before the loop.
    assert of("cheapest").copies == {"fusion bf16[1,8,128,2048]": 1}
    assert of("cheapest", large=CACHE + 1).copies == {}


def test_what_has_no_estimate_is_told():
    expected = {"sort": 1, "call-start": 1, "gather fusion": 1, "tpu_custom_call": 1}
    assert of("cheapest").unknown == expected


def test_collectives():
    assert of("cheapest").collectives == {"all-reduce": 4096 * 4}


# ---- the report


def figures(cycles: int) -> Figures:
    found = Cost({"verify": cycles}, {"verify": 0.5e6}, {"sort": 2}, {}, {"all-reduce": 3 * 10**6})
    return Figures(found, 9e6, {"verify": 2e6}, 0.1e6, 3 * 2**30)


CASE = Case(
    "v6e-1", "llama-3-8b", 1, {"plain": figures(1500000), "paper": figures(2500000)}, figures(10**6)
)


def test_speedups():
    assert CASE.over_plain("paper") == 1.5
    lines = text(CASE, [3.0]).splitlines()
    assert "    3.00 tokens per pass: 2.00" in lines
    row = next(line for line in lines if "GSM8K" in line).split()
    assert row == ["GSM8K", "3.89", "2.59", "2.65", "-2%"]  # (1 + 2.89) / 1.5
    assert any(re.fullmatch(r" +step +2\.000 +2\.000 +1\.000", line) for line in lines)
    assert any(re.fullmatch(r" +over plain +1\.500", line) for line in lines)
    assert "    without an estimate: 2 sort" in lines
    assert "    collectives: all-reduce 3.00 MB" in lines


def test_json():
    found = json.loads(json.dumps(as_json([CASE], {"slots": 64})))
    paper = found["cases"][0]["decode"]["paper"]
    assert (paper["cycles"], paper["over_plain"], paper["over_roofline"]) == (3e6, 1.5, 1.5)
    assert paper["greedy"]["cycles"] == {"verify": 2500000}
    assert found["settings"] == {"slots": 64}


def test_the_even_tree():
    tree = cost.even_tree(3)
    assert tree.size == 2**3
    assert set(tree.paths) == {(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)}
    assert cost.TREES["even-64"].size == 64


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trees", "nothing"], "tree 'nothing' is not known"),
        (["--machines", "v9"], "invalid choice: 'v9'"),
        (["--batch", "0"], "must be at least 1"),
    ],
)
def test_wrong_options(argv, message, capsys):
    with pytest.raises(SystemExit):
        cost.main(argv)
    assert message in capsys.readouterr().err


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the TPU compiler is libtpu, which is not installed"):
        chips(cost.MACHINES["v6e-1"])


def test_a_compiler_of_another_version(monkeypatch):
    class Unreadable:
        def as_text(self) -> str:
            raise NotImplementedError

    monkeypatch.setattr(importlib.metadata, "version", {"jaxlib": "1", "libtpu": "2"}.get)
    with pytest.raises(ValueError, match=r"^jaxlib 1 and libtpu 2 do not understand each other"):
        program_text(Unreadable())


# ---- with the compiler

COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU's compiler"
)


@pytest.fixture(scope="module")
def four_layers() -> tuple[Programs, Roof]:
    jax.config.update("jax_platforms", "cpu")
    mesh = chips(cost.MACHINES["v6e-1"])
    roof = cost.measure_roof(*cost.streaming_product(mesh))
    target = dataclasses.replace(cost.MODELS["llama-3-8b"], num_layers=4)
    return Programs(mesh, target, cost.head_for(target, 32768), 1, 2048, 256), roof


@COMPILER
@pytest.mark.slow
def test_a_plain_step_is_close_to_its_roofline(four_layers):
    found = cost.decode_figures(four_layers[0], PLAIN, four_layers[1])
    assert 0.98 < found.over_roofline < 1.10
    assert found.greedy.copies == {}
    assert found.greedy.unknown == {}


@COMPILER
@pytest.mark.slow
def test_a_speculative_step_copies_no_cache(four_layers):
    programs, roof = four_layers
    found = cost.decode_figures(programs, parse_tree("paper"), roof)
    assert found.greedy.copies == {}
    assert set(found.greedy.cycles) >= set(PARTS)
    # Each part near its own roofline: nothing is read twice, and nothing else takes long.
    for part, roofline in decode_roofline(programs, parse_tree("paper"), roof).items():
        assert 0.9 < found.greedy.cycles[part] / roofline < 1.15, part
