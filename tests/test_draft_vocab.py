"""The draft vocabulary: rankings, files, and that the text does not depend on it."""

from pathlib import Path

import numpy as np
import pytest
from tiny_chat import chain_model, cycle_table, ids
from tiny_head import perfect_head

from clover_jax.draft_vocab import read_draft_vocab, resized
from infer import load, speculative_generate


def test_a_ranking_is_cut_and_continued() -> None:
    ranking = np.array([5, 2, 7], np.int32)
    assert resized(ranking, 2, 9).tolist() == [5, 2]
    assert resized(ranking, 6, 9).tolist() == [5, 2, 7, 0, 1, 3]
    assert resized(ranking, 9, 9) is None
    assert resized(None, 3, 9).tolist() == [0, 1, 2]
    for size in (0, 10):
        with pytest.raises(ValueError, match=f"between 1 and 9, got {size}"):
            resized(ranking, size, 9)


def test_a_file_lists_ids(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("5\n\n2\n7\n")
    assert read_draft_vocab(path, 9).tolist() == [5, 2, 7]
    path.write_text("\n".join(map(str, range(9))))
    assert read_draft_vocab(path, 9) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("5\nx\n", r"ids.txt:2: 'x' is no token id below 9"),
        ("9\n", r"ids.txt:1: '9' is no token id below 9"),
        ("-1\n", r"ids.txt:1: '-1'"),
        ("3\n4\n3\n", r"ids.txt:3: token id 3 is there twice"),
        ("\n", "holds no token id"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "ids.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_draft_vocab(tmp_path / "ids.txt", 9)


def test_the_text_is_the_same_with_any(tmp_path: Path) -> None:
    target = chain_model(tmp_path / "target", cycle_table("abcdefghij"))
    head = perfect_head(target, tmp_path / "head")
    (tmp_path / "ids.txt").write_text("\n".join(map(str, ids("abcdef"))))
    passes = {}
    for vocabulary in (None, tmp_path / "ids.txt", 1, 40):
        model = load(target=target, draft=head, draft_vocab=vocabulary)
        chat = [{"role": "user", "content": "hello"}]
        found = speculative_generate(model, chat, 20, tree="chain-3")
        assert found.token_ids == [[*ids("abcdefghij"), 2]], vocabulary
        passes[vocabulary] = found.stats.target_passes[0]
    assert passes[None] == passes[40] == 4
    assert 4 < passes[tmp_path / "ids.txt"] < passes[1] == 11
    with pytest.raises(ValueError, match="draft_vocab is for a head"):
        load(target=target, draft_vocab=3)
