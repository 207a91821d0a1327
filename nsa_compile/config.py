"""The configuration of a training run: typed, closed against unknown keys, checked before anything starts.

A run is described by a YAML file of the sections below and by ``KEY=VALUE`` overrides on top. Every mistake becomes
a :class:`~nsa_compile.errors.UserError` of one line. Nothing here imports torch, so a typing error costs no start-up
time.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nsa_compile.errors import UserError, printable, shortened
from nsa_compile.files import open_regular
from nsa_compile.models.config import MAX_SIZE, NSAConfig, from_plain, required
from nsa_compile.models.pattern import Pattern
from nsa_compile.models.variant import REGISTERED, find
from nsa_compile.passes import ORDER

TOKENIZER_VOCAB_SIZES = {"byte": 256, "gpt2": 50257}
# Tasks that are made up as they are needed, and of which it is known what can be predicted.
SYNTHETIC = ("copying", "needle")
# Data sets that need no file; any other ``data.name`` is a path.
BUILT_IN = ("shakespeare", "uniform", *SYNTHETIC, "fineweb-edu")
# A hundred times what any configuration holds: values, references counted as often as they are used, and bytes.
MAX_VALUES = 10_000
MAX_BYTES = 1 << 18
MAX_DEPTH = 100  # of lists and mappings within one another
# No number of a configuration is larger; Python cannot even print one of some thousand digits.
MAX_BITS = 128
MAX_PATH = 4095


def _known_pass(name: str) -> str:
    if name not in ORDER:
        raise PydanticCustomError("pass_name", "the passes are {passes}", {"passes": ", ".join(ORDER)})
    return name


def _number_as_text(value: Any) -> Any:
    """A single block, which YAML reads as a number."""
    return str(value) if type(value) is int else value


def _one_line(text: str) -> str:
    if not printable(text) == text:
        raise PydanticCustomError("characters", "it must not hold line ends or control characters")
    return text


PassName = Annotated[str, AfterValidator(_known_pass)]
# A text that is printed, and a path or a name: no system has one with a NUL in it.
Text = Annotated[str, Field(max_length=MAX_PATH), AfterValidator(_one_line)]
Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent conversions.

    The text below a key is its meaning, as ``nsa-compile config keys`` shows it. Pydantic would read it, too, but at
    every import, which takes a quarter of a second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """Where a run leaves its files, and its random seed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "run"
    """Name of the run; with the time behind it, it names the run's directory."""
    dir: Text = "runs"
    """Directory in which each run makes a directory of its own."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Seed of the weights, the batches and the sample."""


class DataSection(Section):
    """What a run is trained on."""

    name: Text = "shakespeare"
    """Data set: shakespeare, a synthetic task (copying, needle), uniform (random bytes), fineweb-edu, or the path of a
    file or directory."""
    tokenizer: Literal["byte", "gpt2"] = "byte"
    """How text becomes tokens: as bytes, or by GPT-2's byte-pair encoding (needs the gpt2 extra)."""
    min_distance: Count | None = None
    """Tokens of a synthetic task that lie at least between a question and its answer; null takes model.pattern.window,
    so that the answer lies outside of the window, of an attention that has one."""
    needles: Annotated[int, Field(ge=1, le=16)] = 16  # of as many keys as there are
    """How many records the task needle hides and asks for."""
    text_field: Text = "text"
    """Key or column with the text, for JSON lines and Parquet."""
    cache_dir: Annotated[Text, Field(min_length=1)] | None = None
    """Directory in which the tokens of files are kept; null takes the platform's directory for caches."""
    chat: bool = False
    """Whether the lines of a JSON lines file are conversations, {"messages": [{"role": ..., "content": ...}, ...]}, one
    to a sequence; train.loss = answers then is about what the assistant says."""
    stream: bool = False
    """Whether JSON lines or Parquet files are read and tokenized while the model trains, for data too large to keep as
    tokens. fineweb-edu always is."""
    timeout_s: Seconds = 60.0
    """Seconds that a document of a stream may take to arrive."""


class TrainSection(Section):
    """Length and shape of the training; ``steps`` and every ``*_every`` count optimizer steps.

    A micro batch is that of all processes together: each takes an equal share of its sequences, so the same run on
    more processes sees the same batches.
    """

    steps: Count = 300
    """Optimizer steps of the run."""
    seq_len: Count = 512
    """Tokens of a sequence, S."""
    batch_size: Count = 8
    """Sequences of a micro batch, of all processes together."""
    accumulate: Count = 1
    """Micro batches of an optimizer step, whose gradients are added up."""
    loss: Literal["all", "answers"] = "all"
    """Tokens that the loss is the mean over: all, or only the answers of a synthetic task or of conversations."""
    init_from: Annotated[Text, Field(min_length=1)] | None = None
    """Weights to begin with, of the same model: a run, one of its checkpoints, a folder of nsa-compile export, import
    or convert, or hf:ORG/NAME; null draws them. --init-from is short for it."""
    dtype: Literal["float32", "bf16"] = "float32"
    """Number format of the computation; with bf16 (autocast) weights and optimizer state stay float32."""
    matmul: Literal["native", "float8", "int8"] = "native"
    """Number format in which the blocks' linear layers multiply: native is that of train.dtype; float8 and int8 round
    both operands, forward and backward, while the weights stay float32 (needs the torchao extra)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU where there is one."""
    activation_checkpointing: Annotated[Text, BeforeValidator(_number_as_text)] = "none"
    """Blocks whose activations are computed again in the backward pass instead of being kept: none, all, or ranges
    such as 0-5,8."""
    eval_every: Count = 100
    """Optimizer steps between two measurements of the held-out loss."""
    eval_batches: Count = 8
    """Micro batches that the held-out loss is the mean over."""
    save_every: CountOrNone = 0
    """Optimizer steps between two checkpoints; 0 writes only the final one."""
    keep_last: Count = 3
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Whether the checkpoint with the lowest held-out loss stays as well."""
    on_nonfinite: Literal["halt", "skip"] = "halt"
    """What follows a loss or gradient that is not finite: the run ends, or the step is skipped. Neither changes a
    weight."""
    max_skipped: Count = 10
    """How many steps in a row may be skipped before the run ends."""
    log_every: Count = 10
    """Optimizer steps between two lines of the log."""
    sample_tokens: CountOrNone = 256
    """Tokens that the trained model generates at the end; 0 writes no sample."""


Adapted = Literal[
    "attention.q", "attention.k", "attention.v", "attention.gate", "attention.out", "mlp.gate", "mlp.up", "mlp.down"
]


class LoraSection(Section):
    """Low-rank adapters, trained in place of the weights (needs the lora extra); see docs/fine-tuning.md."""

    rank: CountOrNone = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: Count = 16
    """What adapters are multiplied by, times their rank."""
    targets: Annotated[list[Adapted], Field(min_length=1)] = list(get_args(Adapted))
    """Linear layers of each block that get an adapter; all others are frozen."""


class OptimSection(Section):
    """AdamW: linear warm-up over ``warmup`` steps, then a cosine to ``min_lr_ratio`` times ``lr`` at the last step."""

    name: Literal["adamw", "adamw8bit", "adamw4bit"] = "adamw"
    """How AdamW keeps its two moments: in float32, or in 8 or 4 bits with a scale for each block of values, for weights
    of at least 4096 values (needs the torchao extra)."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate at the end of the warm-up, the highest of the run."""
    # A list, because YAML has no tuples and strict validation takes nothing else for one.
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of AdamW's first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, for weights of two and more dimensions: norms and biases have none."""
    warmup: CountOrNone | None = None
    """Optimizer steps until lr is reached, at most train.steps; null takes a tenth of train.steps."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate of the last step, as a fraction of lr."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. null clips nothing."""
    fused: bool = True
    """Whether adamw computes a step in one kernel; of no effect on the others, which are compiled at the first step."""

    def warmup_of(self, steps: int) -> int:
        """Over how many steps a run of `steps` warms up."""
        return steps // 10 if self.warmup is None else self.warmup


class DDPSection(Section):
    """Training on several processes; of no effect on one."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """What a process keeps: ddp the whole model; fsdp a share of its weights and optimizer state, for models that do
    not fit otherwise."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """What processes talk through; auto takes NCCL on GPUs and Gloo on CPUs."""
    bucket_mb: Annotated[float, Field(ge=1)] = 25
    """Megabytes of gradients that are sent at a time; less where a model has fewer than four times that, down to 1."""
    compress: Literal["bf16", "fp16", "none"] = "bf16"
    """Number format in which gradients are sent; none sends them as they are."""
    nccl_preset: Literal["none", "pcie"] = "none"
    """Settings of NCCL: its own, or those for GPUs without NVLink."""
    timeout_s: Count = 1800
    """Seconds after which a collective operation is an error."""
    max_restarts: CountOrNone = 3
    """How many times --nproc starts processes again that died."""
    port: Annotated[int, Field(ge=1, lt=2**16)] | None = None
    """Port at which the processes of --nproc meet; null takes a free one."""
    grace_s: Count = 60
    """Seconds that the processes of --nproc have to save and leave after SIGTERM."""


class CompileSection(Section):
    """How the blocks of the model are compiled."""

    enabled: bool = True
    """Whether each block is compiled; otherwise attention loops over the tokens, which is slow."""
    nested: Literal["eager", "aot_eager", "inductor"] = "inductor"
    """What compiles the graphs after the passes."""
    disable: list[PassName] = []
    """Names of passes to leave out; nsa-compile passes list shows them."""
    check: bool = True
    """Whether the first call of each compiled block is compared, values and gradients, with the loop it was compiled
    from."""


class LogSection(Section):
    """What a run tells beside its CSV files."""

    tensorboard: bool = False
    """Whether all figures also go to TensorBoard's event files (needs the tensorboard extra)."""
    stats_every: CountOrNone = 100
    """Optimizer steps between two reports of the gates and the selection of every NSA layer, to attention.jsonl; 0
    writes none, and neither does a model whose model.branches leaves a branch out."""


Action = Literal["warn", "dump", "halt", "restart"]


class WatchdogSection(Section):
    """When a run counts as stalled, diverged or degraded, and what is done then.

    Actions: ``warn`` says so; ``dump`` also has all ranks write their stacks; ``halt`` moreover asks the training to
    save and leave; ``restart`` has the ranks write their stacks and kills them, for the launcher to start them again.
    """

    enabled: bool = True
    """Whether the run is watched."""
    interval_s: Seconds = 5.0
    """Seconds between two heartbeats of a rank, and between two looks of the watchdog."""
    silent_s: Seconds = 60.0
    """Seconds without a heartbeat after which the run is stalled."""
    stall_s: Seconds = 180.0
    """Seconds in one phase after which the run is stalled, unless stall_factor allows more."""
    stall_factor: Annotated[float, Field(ge=1)] = 10.0
    """How many median steps one phase may last in any case."""
    pause_s: Seconds = 1800.0
    """Seconds that the phases checkpoint, evaluate, compile and idle may last."""
    startup_s: Seconds = 1800.0
    """Seconds that a run may take before its first step, with the compilation."""
    warmup_steps: CountOrNone = 20
    """Number of first steps, which count for neither throughput nor memory."""
    throughput_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of its median throughput below which the run is degraded."""
    throughput_steps: Annotated[int, Field(ge=1, le=200)] = 20
    """For how many steps throughput has to be below throughput_fraction."""
    gate_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Share of a branch in the gates of a layer below which the run is degraded."""
    gate_reports: Annotated[int, Field(ge=1, le=50)] = 5
    """In how many reports a branch has to be below gate_share."""
    loss_rise: Annotated[float, Field(gt=0)] = 1.0
    """Nats above its best at which the loss has diverged; a loss or gradient that is not finite has in any case."""
    loss_steps: Annotated[int, Field(ge=1, le=200)] = 20
    """For how many steps the loss has to be loss_rise above its best."""
    memory_growth: Annotated[float, Field(gt=0)] = 0.02
    """Fraction by which memory has to grow from each quarter of memory_steps to the next for the run to be degraded."""
    memory_steps: Annotated[int, Field(ge=8, le=1000)] = 400
    """How many of the last steps are looked at for growing memory."""
    on_stalled: Action = "dump"
    """What is done about a run that is stalled."""
    on_diverged: Action = "warn"
    """What is done about a run that has diverged."""
    on_degraded: Action = "warn"
    """What is done about a run that is degraded."""

    @property
    def restarts(self) -> bool:
        """Whether processes may be killed, to be started again."""
        return self.enabled and "restart" in (self.on_stalled, self.on_diverged, self.on_degraded)


class AcceptSection(Section):
    """What ``nsa-compile validate`` asks for before it says GO; ``null`` asks for nothing."""

    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Least throughput of the baseline, of all processes together."""
    mfu: Fraction | None = None
    """Least MFU of the baseline, as a fraction."""
    scaling: Fraction | None = None
    """Least throughput of a process among others, as a fraction of that of one alone."""
    val_loss: Annotated[float, Field(gt=0)] | None = None
    """Highest held-out loss after the stability run, in nats per token."""
    python_share: Fraction | None = 0.1
    """Largest share of a step that one Python function may take."""
    memory_growth: Annotated[float, Field(ge=0)] | None = 0.05
    """Largest fraction by which memory may grow in the second half of the stability run."""
    gate_share: Fraction | None = 0.01
    """Least share that each branch keeps of the gates in every layer."""


class ProfileSection(Section):
    """What a run lets profilers see."""

    nvtx: bool = False
    """Whether named ranges are opened around steps, their phases, checkpoints and passes and, inside compiled blocks,
    around the branches of attention: NVTX ranges of the domain nsa, and regions of torch's profiler."""


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: NSAConfig
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    optim: OptimSection = OptimSection()
    ddp: DDPSection = DDPSection()
    compile: CompileSection = CompileSection()
    log: LogSection = LogSection()
    watchdog: WatchdogSection = WatchdogSection()
    accept: AcceptSection = AcceptSection()
    profile: ProfileSection = ProfileSection()

    @field_validator("model", mode="before")
    @classmethod
    def _build_model(cls, value: Any) -> Any:
        # The model's dataclasses check their own fields; pydantic in strict mode takes no mapping for one.
        return from_plain(NSAConfig, value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        # Each message starts with the dotted key to change.
        vocab_size = TOKENIZER_VOCAB_SIZES[self.data.tokenizer]
        if self.model.vocab_size < vocab_size:
            raise ValueError(
                f"model.vocab_size = {self.model.vocab_size} must be at least {vocab_size}, "
                f"the vocabulary of the {self.data.tokenizer} tokenizer"
            )
        if self.data.name in ("uniform", *SYNTHETIC) and self.data.tokenizer != "byte":
            raise ValueError(
                f"data.tokenizer = {self.data.tokenizer!r} must be 'byte' for data.name = '{self.data.name}', "
                "which is made of bytes"
            )
        if self.data.stream and self.data.name in BUILT_IN and self.data.name != "fineweb-edu":
            raise ValueError(
                f"data.stream = true is for files and must be false for the built-in data.name = '{self.data.name}'"
            )
        if self.data.chat and (self.data.name in BUILT_IN or self.data.stream):
            where = "data.stream = true" if self.data.stream else f"the built-in data.name = '{self.data.name}'"
            raise ValueError(f"data.chat = true is for a file of JSON lines and must be false for {where}")
        if self.train.loss == "answers" and self.data.name not in SYNTHETIC and not self.data.chat:
            raise ValueError(
                f"train.loss = 'answers' must be 'all' for data.name = '{self.data.name}': "
                f"which tokens are answers is known of {', '.join(SYNTHETIC)} and, with data.chat = true, conversations"
            )
        if self.lora.rank:
            self._check_lora()
        least, rule = self.model.variant.min_seq_len(self.model)
        if self.train.seq_len < least:
            raise ValueError(f"train.seq_len = {self.train.seq_len} must be at least {rule}")
        if self.optim.warmup is not None and self.optim.warmup > self.train.steps:
            raise ValueError(f"optim.warmup = {self.optim.warmup} must not exceed train.steps = {self.train.steps}")
        if self.train.device == "cpu" and self.ddp.backend == "nccl":
            raise ValueError("ddp.backend = 'nccl' must be 'gloo' or 'auto' where train.device = 'cpu'")
        if self.train.matmul != "native":
            # Layers between two other sizes may stay native; with this one none is left.
            if self.model.dim % 16:
                raise ValueError(
                    f"model.dim = {self.model.dim} must be a multiple of 16 for train.matmul = {self.train.matmul!r}"
                )
            # The gradient of a weight is a product over the tokens.
            if self.train.seq_len % 16:
                raise ValueError(
                    f"train.seq_len = {self.train.seq_len} must be a multiple of 16 for train.matmul = "
                    f"{self.train.matmul!r}"
                )
        if self.optim.name != "adamw" and self.ddp.strategy == "fsdp":
            raise ValueError(
                f"optim.name = {self.optim.name!r} must be 'adamw' for ddp.strategy = 'fsdp': its blocks of quantized "
                "moments would differ with the number of processes, and checkpoints are for any number"
            )
        self.checkpointed_blocks()
        # One beat may be late.
        if self.watchdog.silent_s < 3 * self.watchdog.interval_s:
            raise ValueError(
                f"watchdog.silent_s = {self.watchdog.silent_s} must be at least three times watchdog.interval_s = "
                f"{self.watchdog.interval_s}, the time between two heartbeats"
            )
        return self

    def _check_lora(self) -> None:
        for key, value, right, rule in (
            ("train.init_from", self.train.init_from, self.train.init_from is not None, "name the weights to freeze"),
            ("train.matmul", self.train.matmul, self.train.matmul == "native", "be 'native'"),
            ("ddp.strategy", self.ddp.strategy, self.ddp.strategy == "ddp", "be 'ddp'"),
        ):
            if not right:
                raise ValueError(f"{key} = {value!r} must {rule} for lora.rank = {self.lora.rank}")
        if self.model.attention != "nsa" and "attention.gate" in self.lora.targets:
            raise ValueError(
                f"lora.targets = {self.lora.targets} must not name 'attention.gate' for model.attention = "
                f"{self.model.attention!r}, which has no gates"
            )

    def checkpointed_blocks(self) -> frozenset[int]:
        """The blocks that ``train.activation_checkpointing`` names; a ValueError where there is none of them."""
        text, layers = self.train.activation_checkpointing, self.model.n_layers
        if text in ("none", "all"):
            return frozenset(range(layers) if text == "all" else ())
        blocks: set[int] = set()
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if not first <= last < layers:
                raise ValueError(
                    f"train.activation_checkpointing = {text!r} must be none, all, or ranges of blocks such as 0-5,8, "
                    f"counted from 0 to {layers - 1}"
                )
            blocks.update(range(first, last + 1))
        return frozenset(blocks)

    def sizes(self) -> dict[str, Any]:
        """The sizes that every figure of a run belongs to."""
        shape, model = self.train, self.model
        return {
            "seq_len": shape.seq_len,
            "batch_size": shape.batch_size,
            "accumulate": shape.accumulate,
            "dtype": shape.dtype,
            "attention": model.attention,
            "layers": model.n_layers,
            # None where the attention has no use for such a size; its pattern may be one that others share.
            **{
                name: getattr(model.pattern, name) if name in model.variant.shown_sizes.values() else None
                for name in ("num_selected", "window")
            },
        }

    def require_equal_layers(self) -> None:
        """Refuse a model whose layers differ, for what looks at one block and takes it for all.

        Raises:
            UserError: the attention has layers that differ.
        """
        if not self.model.variant.alike:
            raise UserError(
                f"model.attention = {self.model.attention} has layers that differ, and one block is looked at here; "
                f"name one of its attentions, such as --set model.attention={self.model.layers()[0].attention}"
            )

    def changed(self, **sections: dict[str, Any]) -> RunConfig:
        """The configuration with other values of some keys, by section but the model; they are not checked."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)

    def to_yaml(self) -> str:
        """The configuration with every default filled in, as YAML that loads to an equal configuration."""
        return yaml.safe_dump(self.plain(), sort_keys=False)

    def plain(self) -> dict[str, Any]:
        """The configuration as it is read from a file: nested dicts of numbers, texts and lists."""
        return self.model_dump(mode="json")


def default_config_text() -> str:
    """The YAML of the run that ``nsa-compile train`` starts when it is given no file."""
    return (resources.files("nsa_compile") / "configs" / "shakespeare_cpu.yaml").read_text(encoding="utf-8")


def load_config(path: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run configuration.

    Args:
        path: YAML file; ``None`` takes the packaged default run.
        overrides: ``"section.key=value"`` strings, values typed as in YAML; later ones win.

    Raises:
        UserError: one line for the first thing that is wrong.
    """
    if path is None:
        text, origin = default_config_text(), "the default configuration"
    else:
        text, origin = _read(path), shortened(path)
    values = _parse_yaml(text, origin)
    if not isinstance(values, dict):
        raise UserError(f"{origin} must hold sections (run, model, data, …), not {_short(values)}")
    sections = _sections_of(values, overrides)
    for override in overrides:
        _apply_override(values, override, sections)
    _reject_unknown_keys(values, sections)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_describe(error)) from None


def options_of(path: str | None, overrides: Sequence[str]) -> list[str]:
    """The options that lead a command to the configuration of `load_config(path, overrides)`."""
    chosen = [] if path is None else ["--config", path]
    return [*chosen, *(word for override in overrides for word in ("--set", override))]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as dotted keys and values."""
    if not isinstance(value, dict):
        yield prefix.rstrip("."), value
        return
    for name, entry in value.items():
        yield from flatten(entry, f"{prefix}{name}.")


def _read(path: str) -> str:
    name = shortened(path)
    try:
        with open_regular(Path(path), follow=True) as file:
            content = file.read(MAX_BYTES + 1)
        _reject_too_many_bytes(len(content), name)
        return content.decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"configuration file '{name}' does not exist; check its path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        if os.path.isdir(path):
            reason = os.strerror(errno.EISDIR)
        raise UserError(f"configuration file '{name}' cannot be read: {reason}; name a YAML file") from None


def _reject_too_many_bytes(count: int, origin: str) -> None:
    if count > MAX_BYTES:
        raise UserError(f"{origin} must not hold more than {MAX_BYTES:,} bytes; correct it there")


class _TooManyValues(Exception):
    """A text means more values than ``MAX_VALUES``."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: ``3e-4`` is a number, and a key given twice is a mistake.

    Values are counted before any is made: references, and merged mappings above all, make a few lines mean more of
    them than there is memory for, or one that holds itself.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_VALUES:
            raise _TooManyValues
        if self._depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MAX_VALUES:
            raise _TooManyValues
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "a key must be a single word", key.start_mark)
            if (key.tag, key.value) in seen:
                problem = f"key {_short(key.value)} is given twice"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
            seen.add((key.tag, key.value))
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """An integer that can be printed; those with colons, to the base of 60, are of no use here."""
        if len(node.value) > MAX_BITS + 4 or (number := self.construct_yaml_int(node)).bit_length() > MAX_BITS:
            problem = f"a number must have at most {MAX_BITS} bits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
# YAML 1.1 wants a dot in the mantissa and a sign in the exponent; 1.2 and everybody's habit do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node means, references followed each time, up to one too many; as many if it holds itself."""
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # as long as those within are counted
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for entry in node.value for part in entry]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = min(MAX_VALUES + 1, 1 + sum(_size(part, known) for part in parts))
    return known[id(node)]


def _parse_yaml(text: str, origin: str) -> Any:
    _reject_too_many_bytes(len(text), origin)
    try:
        return yaml.load(text, _Loader)
    except _TooManyValues:
        raise UserError(f"{origin} must not hold more than {MAX_VALUES:,} values; correct it there") from None
    except yaml.MarkedYAMLError as error:
        where = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{origin} is not valid YAML{where}: {error.problem}; correct it there") from None
    except yaml.YAMLError as error:
        raise UserError(f"{origin} is not valid YAML: {str(error).splitlines()[0]}; correct it there") from None
    except (ValueError, RecursionError) as error:  # a date in a 13th month, ten thousand brackets
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{origin} cannot be read: {reason}; correct it there") from None


Sections = Mapping[str, Any]


def _sections_of(values: dict[str, Any], overrides: Sequence[str]) -> Sections:
    """Sections and what describes their keys: pydantic models, the dataclasses of the model and its pattern, names.

    Which keys ``model.pattern`` has is up to the attention. Where an override names one whose sizes are of another
    class than those of the file, the file's are taken out of `values`: they are about another attention.
    """
    model = values.get("model")
    ours = model.get("attention", NSAConfig.attention) if isinstance(model, dict) else NSAConfig.attention
    chosen = ours
    for override in overrides:
        key, _, text = override.partition("=")
        chosen = (
            _parse_yaml(text, f"the value of --set '{shortened(override)}'") if key == "model.attention" else chosen
        )
    was, now = _pattern_of(ours), _pattern_of(chosen)
    if isinstance(model, dict) and was is not now:
        model.pop("pattern", None)
    inner = {f"model.pattern.{name}": schema for name, schema in now.sections().items()}
    return {**{name: field.annotation for name, field in RunConfig.model_fields.items()}, "model.pattern": now, **inner}


def _pattern_of(attention: Any) -> type[Pattern]:
    """The class of an attention's sizes; what is no attention, the model refuses."""
    return find(attention if attention in tuple(REGISTERED) else NSAConfig.attention).pattern


def _apply_override(values: dict[str, Any], override: str, sections: Sections) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"--set '{shortened(override)}' must have the form KEY=VALUE, for example --set train.steps=100"
        )
    if key not in _dotted_keys(sections):
        raise UserError(_unknown_key(key, sections))
    parts = key.split(".")
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):  # the file gave a plain value for a section; the override mends that
            inner = values[part] = {}
        values = inner
    values[parts[-1]] = _parse_yaml(text, f"the value of --set '{shortened(override)}'")


def _dotted_keys(sections: Sections, schema: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration as a dotted path, sections included."""
    if isinstance(schema, Mapping):
        names = list(schema)
    elif dataclasses.is_dataclass(schema):
        names = [field.name for field in dataclasses.fields(schema)]
    else:
        names = list(schema.model_fields)
    for name in names:
        yield prefix + name
        if prefix + name in sections:
            yield from _dotted_keys(sections, sections[prefix + name], f"{prefix}{name}.")


def _reject_unknown_keys(values: dict[str, Any], sections: Sections, section: str = "") -> None:
    known = set(_dotted_keys(sections))
    for name, value in values.items():
        key = f"{section}{name}"
        if key not in known:
            raise UserError(_unknown_key(key, sections))
        if key in sections and isinstance(value, dict):
            _reject_unknown_keys(value, sections, f"{key}.")
        elif key in sections and not (value is None and key.startswith("model.pattern.")):
            inner = next(name for name in _dotted_keys(sections) if name.startswith(f"{key}."))
            raise UserError(
                f"{_not_allowed(key, value)}: it is a section, with keys of its own; set one of those in the file or "
                f"with --set {inner}=VALUE"
            )


def _unknown_key(key: str, sections: Sections) -> str:
    key = shortened(key)
    known = list(_dotted_keys(sections))
    section, _, leaf = key.rpartition(".")
    names = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    if section in sections:  # whose name all its keys begin with, however little else they share
        close = [f"{section}.{name}" for name in difflib.get_close_matches(leaf, names, n=1, cutoff=0.7)]
    else:
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    # `steps` alone, or a key under the wrong section: compare the last parts too.
    by_leaf = difflib.get_close_matches(leaf, [name.rpartition(".")[2] for name in known], n=1, cutoff=0.7)
    if not close and by_leaf:
        close = [name for name in known if name.rpartition(".")[2] == by_leaf[0]][:1]
    if close:
        advice = f"did you mean '{close[0]}'?"
    elif section in sections:
        advice = f"'{section}' has {', '.join(names) or 'no keys'}"
    else:
        advice = f"the sections are {', '.join(name for name in known if '.' not in name)}"
    return f"unknown configuration key '{key}'; {advice}"


def _describe(error: ValidationError) -> str:
    """One line for a validation error: its first finding and how many others there are."""
    first, *others = error.errors()
    # Without the index into a list: the key to change is the list.
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    if key == "model" and first["type"] == "missing":
        return (
            f"the section model is missing: give it at least {', '.join(required(NSAConfig))}; "
            "nsa-compile config show prints a whole configuration to begin with"
        )
    option = f"--set {key}=VALUE"
    if first["type"] == "value_error":
        # A rule of the model's own or between sections: its message begins with the field, which completes the key.
        field, _, rule = str(first["ctx"]["error"]).partition(" ")
        key = ".".join(filter(None, (key, field)))
        text, option = f"{key} {rule}", f"--set {key}=VALUE"
    else:
        message, value = first["msg"][:1].lower() + first["msg"][1:], first["input"]
        text = f"{_not_allowed(key, value)}: {message}"
        if first["type"] == "string_type" and value is not None:  # without quotes, YAML reads a number or a date
            option = f"--set '{key}=\"{value if type(value) is int else 'VALUE'}\"'"
    more = f" (and {len(others)} more)" if others else ""
    return f"{text}; change it in the file or with {option}{more}"


def _not_allowed(key: str, value: Any) -> str:
    return f"{key} is empty" if value is None else f"{key} = {_short(value)} is not allowed"


def _short(value: Any) -> str:
    return shortened(repr(value))
