"""The settings of a training run, and the recipe of each preset."""

import dataclasses
import json
import math
from pathlib import Path

from flax_pallas_attn.rotary import Llama3Scaling, Rotary, YarnScaling
from models.config import PRESETS, GPTConfig, PresetName
from models.sampling import Sampling


class InputError(ValueError):
    """A mistake of the caller's that the message says how to mend; shown without a traceback."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text; tokens are its bytes."""

    directory: Path = Path("examples/data/austen")
    """Where the .txt files are."""
    validation_file: str = "persuasion.txt"
    """The file to validate on; the model trains on all others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the learning rate rises linearly, then falls along a cosine to the last step."""

    learning_rate: float
    """At its highest."""
    warmup_steps: int
    """Steps until then."""
    final_learning_rate: float = 0.0
    """At the last step."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.99
    """Decay of the mean of squared gradients."""
    weight_decay: float = 0.1
    """Of matrices (kernels and embeddings), times the learning rate."""
    max_gradient_norm: float = 1.0
    """Gradients whose global norm is larger are scaled down to it."""

    def __post_init__(self):
        for name in ("learning_rate", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name}={getattr(self, name)} must be positive and finite.")
        if not 0 <= self.final_learning_rate <= self.learning_rate:
            raise InputError(
                f"final_learning_rate={self.final_learning_rate} must be between 0 and "
                f"learning_rate={self.learning_rate}."
            )
        if self.warmup_steps < 0:
            raise InputError(f"warmup_steps={self.warmup_steps} must not be negative.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be in [0, 1).")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"weight_decay={self.weight_decay} must be finite and not negative.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Loss on the validation file; the last step always evaluates, on the whole file."""

    every_steps: int
    """Steps between evaluations."""
    tokens: int
    """At most so many tokens, spread over the file, before the last step."""

    def __post_init__(self):
        _check_positive(self, "every_steps", "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints; the last step always writes one."""

    every_steps: int
    """Steps between checkpoints."""
    keep: int = 2
    """How many to keep, the latest ones."""
    asynchronous: bool = True
    """Write while training goes on."""

    def __post_init__(self):
        _check_positive(self, "every_steps", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that is generated at the end."""

    prompt: str = "She had "
    """What it begins with."""
    new_tokens: int
    """How much of it, in tokens."""
    temperature: float = 0.7
    """0 takes the likeliest token each time, 1 draws from the model's distribution."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens whose probabilities sum to p."""

    def __post_init__(self):
        _check_positive(self, "new_tokens")
        if not self.prompt:
            raise InputError("prompt='' must have at least one character.")
        self.sampling()

    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a GPT on text, whose bytes are the tokens, whatever the preset.

    Everything is set by the preset, and each setting can be changed by its flag. A run lives in
    runs/NAME: settings, metrics, loss curve, sample, checkpoints. The same command continues it
    from its last checkpoint. Ctrl-C and SIGTERM write a checkpoint first (exit codes 130 and 143).
    """

    preset: PresetName
    """Where the other settings come from."""
    name: str
    """Of the run: a directory in runs_directory."""
    runs_directory: Path = Path("runs")
    """Where runs are kept."""
    seed: int = 0
    """Of parameters, batches and dropout."""
    steps: int
    """Batches to train on."""
    batch_size: int
    """Rows per batch."""
    row_tokens: int
    """Tokens per row."""
    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl."""
    data: DataConfig = DataConfig()
    model: GPTConfig
    optimizer: OptimizerConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    sample: SampleConfig

    def __post_init__(self):
        _check_positive(self, "steps", "batch_size", "row_tokens", "log_every_steps")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed={self.seed} must be between 0 and {2**32 - 1}.")
        if self.name in ("", ".", "..") or Path(self.name).name != self.name:
            raise InputError(
                f"name={self.name!r} must be the name of a directory, without '/', and neither "
                "'.' nor '..'."
            )
        if self.row_tokens > self.model.context_tokens:
            raise InputError(
                f"row_tokens={self.row_tokens} is longer than "
                f"model.context_tokens={self.model.context_tokens}; lower one or raise the other."
            )
        if self.optimizer.warmup_steps >= self.steps:
            raise InputError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be below "
                f"steps={self.steps}."
            )
        if self.model.vocab_size < 256:
            raise InputError(
                f"model.vocab_size={self.model.vocab_size} must be at least 256: tokens are bytes."
            )
        sample_tokens = len(self.sample.prompt.encode()) + self.sample.new_tokens
        if sample_tokens > self.model.context_tokens:
            raise InputError(
                f"sample.prompt and sample.new_tokens={self.sample.new_tokens} make "
                f"{sample_tokens} tokens, more than model.context_tokens="
                f"{self.model.context_tokens}; ask for fewer."
            )

    @property
    def run_directory(self) -> Path:
        """Where everything that the run writes goes."""
        return self.runs_directory / self.name

    def to_json(self) -> dict:
        """The settings as JSON values, nested as the dataclasses are."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def model_from_json(settings: dict) -> GPTConfig:
    """The model of a run, from the "model" of what `TrainConfig.to_json` made."""
    rotary = settings["rotary"]
    if rotary is not None:
        scaling = rotary["scaling"]
        if scaling is not None:
            kinds = {
                frozenset(field.name for field in dataclasses.fields(kind)): kind
                for kind in (Llama3Scaling, YarnScaling)
            }
            scaling = kinds[frozenset(scaling)](**scaling)
        rotary = Rotary(**{**rotary, "scaling": scaling})
    return GPTConfig(**{**settings, "rotary": rotary})


def _check_positive(config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1.")
        if value >= 2**31:
            raise InputError(f"{name}={value} must be below {2**31}, so that int32 holds it.")


RECIPES: dict[PresetName, TrainConfig] = {
    # Within 5 minutes on two CPU cores; the settings are measured in benchmarks/LOG.md.
    "tiny": TrainConfig(
        preset="tiny",
        name="tiny",
        steps=2000,
        batch_size=8,
        row_tokens=128,
        model=PRESETS["tiny"],
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        evaluation=EvaluationConfig(every_steps=250, tokens=32_768),
        checkpoint=CheckpointConfig(every_steps=500),
        sample=SampleConfig(new_tokens=120),
    ),
    # Source: Brown et al., 2020 (arXiv 2005.14165), table 2.1: rate and batch of a GPT this size.
    "gpt2": TrainConfig(
        preset="gpt2",
        name="gpt2",
        steps=20_000,
        batch_size=512,
        row_tokens=1024,
        model=PRESETS["gpt2"],
        optimizer=OptimizerConfig(
            learning_rate=6e-4, warmup_steps=700, final_learning_rate=6e-5, beta2=0.95
        ),
        evaluation=EvaluationConfig(every_steps=250, tokens=1_048_576),
        checkpoint=CheckpointConfig(every_steps=1000),
        sample=SampleConfig(new_tokens=500),
    ),
    "gpt2-medium": TrainConfig(
        preset="gpt2-medium",
        name="gpt2-medium",
        steps=20_000,
        batch_size=512,
        row_tokens=1024,
        model=PRESETS["gpt2-medium"],
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_steps=700, final_learning_rate=3e-5, beta2=0.95
        ),
        evaluation=EvaluationConfig(every_steps=250, tokens=1_048_576),
        checkpoint=CheckpointConfig(every_steps=1000),
        sample=SampleConfig(new_tokens=500),
    ),
    # Source: Touvron et al., 2023 (arXiv 2302.13971), section 2.3: optimizer; rate of the 7B model.
    "llama-1b": TrainConfig(
        preset="llama-1b",
        name="llama-1b",
        steps=20_000,
        batch_size=256,
        row_tokens=4096,
        model=PRESETS["llama-1b"],
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_steps=2000, final_learning_rate=3e-5, beta2=0.95
        ),
        evaluation=EvaluationConfig(every_steps=250, tokens=1_048_576),
        checkpoint=CheckpointConfig(every_steps=1000),
        sample=SampleConfig(new_tokens=500),
    ),
}
