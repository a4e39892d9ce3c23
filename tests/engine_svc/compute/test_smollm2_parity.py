"""The default model, dequantised: the same greedy ids as transformers on 20 prompts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from engine_svc.compute.executor import Executor, ExecutorConfig
from engine_svc.planning.step import SamplingParameters
from tests.fakes.decoding import ExecutorRows

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
# Two logits nearer than this may change places by rounding.
NEAR = 1e-3
PROMPTS = [
    "What is the capital of France?",
    "Once upon a time",
    "def fibonacci(n):",
    "The three primary colours are",
    "Explain gravity to a child.",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "Translate to German: good morning",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "Water boils at",
    "A haiku about autumn:",
    "In 1969, people first",
    "import numpy as np\n",
    "List five fruits.",
    "The meaning of life is",
    "To bake bread you need",
    "Q: Who wrote Hamlet?\nA:",
    "Der Hund läuft",
    "🦜 parrots are",
]
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def reader(default_model_path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(default_model_path)


@pytest.fixture(scope="module")
def prompts(reader: gguf.GGUFReader) -> list[list[int]]:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(reader: gguf.GGUFReader) -> LlamaForCausalLM:
    """transformers' Llama with the file's weights, dequantised and put back into HF's order."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stem, kind = tensor.name.rsplit(".", 1)
        if stem.endswith(("attn_q", "attn_k")):
            # Heads of 64 rows, whose 32 rotary pairs lie side by side.
            values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(values.shape)
        if stem in TOP_NAMES:
            name = TOP_NAMES[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        state[f"{name}.{kind}"] = torch.from_numpy(np.array(values, np.float32))
    torch.set_num_threads(2)
    # The weights come from the file: random ones first would only cost time.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    # Its frequencies are computed, not in the file, and to_empty() lost them.
    model.model.rotary_emb.__init__(config)
    return model


def test_greedy_ids_of_20_prompts_equal_transformers(
    default_model_path: Path, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    config = ExecutorConfig(
        len(prompts), 2048, 512, kv_memory_bytes=128 << 20, num_threads=2, dtype="float32"
    )
    executor = Executor.load(default_model_path, config, report=lambda line: None)
    greedy = SamplingParameters(max_tokens=NUM_TOKENS, temperature=0.0)
    requests = {row: (prompt, greedy) for row, prompt in enumerate(prompts)}
    sampled = ExecutorRows(executor).run(requests, NUM_TOKENS)
    del executor
    for row, prompt in enumerate(prompts):
        ids = [token.token_id for token in sampled[row]]
        # One forward over our own answer: up to the first difference it is what the reference
        # would have generated, and where it differs it must have been a near tie.
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1).values
        ours = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert float((best - ours).max()) < NEAR, PROMPTS[row]
