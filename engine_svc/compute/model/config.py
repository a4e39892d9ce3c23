"""What the engine must know of a model: one frozen ModelConfig, and how config.json gives it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_svc.compute.model.config_checks import first_given, number, size, window
from protos.wire.errors import StartupError

# Architectures by their Hugging Face name. All are Llama with small changes.
LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
HF_ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; the fields after `theta` matter to the kinds that use them."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Multiplies cos and sin (YaRN's "mscale").
    attention_factor: float = 1.0
    # YaRN: round the borders of its ramp to whole dimensions.
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in (
            *("theta", "factor", "low_freq_factor", "high_freq_factor"),
            *("beta_fast", "beta_slow", "attention_factor"),
        ):
            number(f"rope {name}", getattr(self, name))
        if self.kind != "default":
            size("original_max_position", self.original_max_position)
        if self.theta <= 1.0:
            raise StartupError(f"the model's rope theta is {self.theta:.6g}; it must be above 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise StartupError("the model's rope high_freq_factor is not above its low_freq_factor")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. StartupError for values that no model has."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    rope: RopeConfig
    # One per layer; 0 attends to everything.
    sliding_windows: tuple[int, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers"),
            *("num_heads", "num_kv_heads", "head_dim", "max_model_len"),
        ):
            size(name, getattr(self, name))
        number("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise StartupError(
                f"a model with {self.num_heads} heads over {self.num_kv_heads} KV heads of "
                f"{self.head_dim} values cannot be served"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise StartupError(
                f"layer_types names {len(self.sliding_windows)} layers of {self.num_layers}"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_hf_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory. StartupError if it is not one we can serve."""
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    try:
        return _from_hf_fields(fields)
    except KeyError as error:
        raise StartupError(f"{path} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise StartupError(f"{path} holds a value of the wrong kind: {error}") from error


def _from_hf_fields(fields: Mapping[str, Any]) -> ModelConfig:
    architecture = (fields.get("architectures") or [fields.get("model_type")])[0]
    if architecture not in HF_ARCHITECTURES:
        raise StartupError(
            f"unknown model architecture {architecture!r}; known are {', '.join(HF_ARCHITECTURES)}"
        )
    if fields.get("quantization_config"):
        method = dict(fields["quantization_config"]).get("quant_method")
        raise StartupError(f"checkpoints quantised with {method!r} are not supported; use a GGUF")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise StartupError(f"unknown hidden_act {activation!r}; known is silu")
    num_heads = size("num_heads", fields["num_attention_heads"])
    hidden_size = size("hidden_size", fields["hidden_size"])
    max_position = size("max_model_len", fields["max_position_embeddings"])
    num_layers = size("num_layers", fields["num_hidden_layers"])
    head_dim = first_given(fields.get("head_dim"), hidden_size // num_heads)
    attention_bias = bool(fields.get("attention_bias", False)) and architecture in (LLAMA, QWEN3)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size", fields["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size", fields["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size(
            "num_kv_heads", first_given(fields.get("num_key_value_heads"), num_heads)
        ),
        head_dim=size("head_dim", head_dim),
        rms_norm_eps=number("rms_norm_eps", fields["rms_norm_eps"]),
        max_model_len=max_position,
        rope=_hf_rope(fields, max_position),
        sliding_windows=_hf_sliding_windows(fields, architecture, num_layers),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        # Qwen2 has no switch for biases: always on q, k and v, never on the output.
        qkv_bias=architecture == QWEN2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)) and architecture == LLAMA,
        qk_norm=architecture == QWEN3,
    )


def _hf_rope(fields: Mapping[str, Any], max_position: int) -> RopeConfig:
    # transformers 5 writes one `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    check_rope_kind(kind)
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise StartupError("rotary embeddings over part of a head are not supported")
    factor = float(parameters.get("factor") or 1.0)
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _hf_yarn_attention_factor(parameters, factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=size(
            "original_max_position",
            parameters.get("original_max_position_embeddings") or max_position,
        ),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=attention_factor,
        truncate=bool(parameters.get("truncate", True)),
    )


def check_rope_kind(kind: str) -> None:
    """StartupError for a rope scaling that is not known."""
    if kind not in ROPE_KINDS:
        raise StartupError(f"unknown rope scaling {kind!r}; known are {', '.join(ROPE_KINDS)}")


def _hf_yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    return yarn_attention_factor(factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: equation 22 of the YaRN paper (Peng et al., 2023)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _hf_sliding_windows(
    fields: Mapping[str, Any], architecture: str, num_layers: int
) -> tuple[int, ...]:
    width = window(fields.get("sliding_window"))
    if architecture == MISTRAL:
        return (width,) * num_layers
    if architecture == LLAMA or not fields.get("use_sliding_window", False):
        return (0,) * num_layers
    layer_types = fields.get("layer_types")
    if layer_types is None:
        # Qwen's layers attend to everything up to this one, and slide from it on.
        first_sliding = int(fields.get("max_window_layers", 28))
        return tuple(width if layer >= first_sliding else 0 for layer in range(num_layers))
    return tuple(width if kind == "sliding_attention" else 0 for kind in layer_types)
