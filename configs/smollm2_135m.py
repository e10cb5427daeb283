"""A head for SmolLM2-135M-Instruct, from conversations it wrote itself (train/synthesize.py)."""

from train.config import DistillConfig

config = DistillConfig(
    target="smollm2-135m",
    data=("data/smollm2_135m.jsonl", "data/smollm2_135m_texts.jsonl"),
    output="runs/smollm2_135m",
    max_length=512,
    features="cached",
    batch_size=8,
    epochs=9,
    draft_vocab=8192,
    learning_rate=3e-3,
    eval_fraction=0.01,
)
