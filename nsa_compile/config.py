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
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

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
from nsa_compile.models.config import MAX_SIZE, NSAConfig, SparsePattern
from nsa_compile.passes import ORDER

TOKENIZER_VOCAB_SIZES = {"byte": 256, "gpt2": 50257}
# Tasks that are made up as they are needed, and of which it is known what can be predicted.
SYNTHETIC = ("copying", "needle")
# Data sets that need no file; any other ``data.name`` is a path.
BUILT_IN = ("shakespeare", "uniform", *SYNTHETIC, "fineweb-edu")
# A hundred times what any configuration holds: values, references counted as often as they are used, and bytes.
MAX_VALUES = 10_000
MAX_BYTES = 1 << 18
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
    """Base of every section: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """Where a run leaves its files, and its random seed."""

    # With the time behind it, it names a directory.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "run"
    dir: Text = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337


class DataSection(Section):
    """What is trained on: ``shakespeare``, a synthetic task, ``uniform``, ``fineweb-edu``, or a file or directory.

    ``min_distance`` is how many tokens of a synthetic task lie at least between a question and what it asks for;
    ``None`` takes the model's sliding window, so that the answer lies outside of it. ``needles`` is how many the task
    ``needle`` hides and asks for. ``text_field`` is the key or column with the text, for JSON lines and Parquet. Tokens
    of files are kept below ``cache_dir``; ``None`` takes the platform's directory for caches. With ``stream``, JSON
    lines or Parquet too large for that are read and tokenized while the model trains, as ``fineweb-edu`` always is. A
    document of a stream may take ``timeout_s`` seconds to come.
    """

    name: Text = "shakespeare"
    tokenizer: Literal["byte", "gpt2"] = "byte"
    min_distance: Count | None = None
    needles: Annotated[int, Field(ge=1, le=16)] = 16  # of as many keys as there are
    text_field: Text = "text"
    cache_dir: Annotated[Text, Field(min_length=1)] | None = None
    stream: bool = False
    timeout_s: Seconds = 60.0


class TrainSection(Section):
    """Length and shape of the training; ``steps`` and every ``*_every`` count optimizer steps.

    One optimizer step takes ``accumulate`` micro batches of ``batch_size`` sequences of ``seq_len`` tokens. A value of
    0 for ``save_every`` keeps only the final checkpoint, for ``sample_tokens`` generates no sample. Of the checkpoints,
    the ``keep_last`` newest stay and, with ``keep_best``, the one with the lowest validation loss.

    A micro batch is that of all processes together: each takes an equal share of its sequences, so the same run on
    more processes sees the same batches. ``activation_checkpointing`` names the blocks whose activations are computed
    again in the backward pass instead of being kept: ``none``, ``all``, or ranges such as ``0-5,8``.

    ``loss`` is about ``all`` tokens or, of a synthetic task, about the ``answers``: the others are noise to whom only
    retrieval is to be taught.

    A step whose loss or gradient is not finite changes no weight; ``on_nonfinite`` says whether it ends the run or is
    skipped, at most ``max_skipped`` times in a row.

    ``matmul`` is what the linear layers of the blocks multiply in: ``native`` is that of ``dtype``; ``float8`` and
    ``int8`` scale and round both operands, forward and backward, while the weights stay float32 (they need the torchao
    extra, and a device with units for such numbers).
    """

    steps: Count = 300
    seq_len: Count = 512
    batch_size: Count = 8
    accumulate: Count = 1
    loss: Literal["all", "answers"] = "all"
    dtype: Literal["float32", "bf16"] = "float32"
    matmul: Literal["native", "float8", "int8"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    activation_checkpointing: Annotated[Text, BeforeValidator(_number_as_text)] = "none"
    eval_every: Count = 100
    eval_batches: Count = 8
    save_every: CountOrNone = 0
    keep_last: Count = 3
    keep_best: bool = True
    on_nonfinite: Literal["halt", "skip"] = "halt"
    max_skipped: Count = 10
    log_every: Count = 10
    sample_tokens: CountOrNone = 256


class OptimSection(Section):
    """AdamW: linear warm-up over ``warmup`` steps, then a cosine to ``min_lr_ratio`` times ``lr`` at the last step.

    Without ``warmup`` the warm-up follows the length of the run, a tenth of ``train.steps``. A ``warmup`` that is given
    must not exceed them.

    ``name`` says how its two moments are kept: ``adamw`` in float32, ``adamw8bit`` and ``adamw4bit`` in so many bits
    and a scale for each block of values, for weights of at least 4096 values (they need the torchao extra). ``fused``
    computes a step of ``adamw`` in one kernel; it is of no effect on the others, which are compiled at the first step.
    """

    name: Literal["adamw", "adamw8bit", "adamw4bit"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    # A list, because YAML has no tuples and strict validation takes nothing else for one.
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    warmup: CountOrNone | None = None
    min_lr_ratio: Fraction = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    fused: bool = True

    def warmup_of(self, steps: int) -> int:
        """Over how many steps a run of `steps` warms up."""
        return steps // 10 if self.warmup is None else self.warmup


class DDPSection(Section):
    """Training on several processes; of no effect on one.

    ``ddp`` keeps the whole model in every process, ``fsdp`` a share of its weights and optimizer state, for models that
    do not fit otherwise. Gradients are sent in buckets of ``bucket_mb`` MB, of a small model in at least four, as
    ``compress`` numbers. ``nccl_preset`` ``pcie`` is for GPUs without NVLink. A collective operation that takes longer
    than ``timeout_s`` seconds is an error. ``--nproc`` starts processes that died again, up to ``max_restarts`` times,
    lets them meet at ``port`` (``None``: a free one) and gives them ``grace_s`` seconds to save after SIGTERM.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mb: Annotated[float, Field(ge=1)] = 25
    compress: Literal["bf16", "fp16", "none"] = "bf16"
    nccl_preset: Literal["none", "pcie"] = "none"
    timeout_s: Count = 1800
    max_restarts: CountOrNone = 3
    port: Annotated[int, Field(ge=1, lt=2**16)] | None = None
    grace_s: Count = 60


class CompileSection(Section):
    """Whether each block is compiled, what runs after the passes, and which passes to leave out.

    ``check`` compares the first call of each compiled block, values and gradients, with the loop it was compiled from.
    """

    enabled: bool = True
    nested: Literal["eager", "aot_eager", "inductor"] = "inductor"
    disable: list[PassName] = []
    check: bool = True


class LogSection(Section):
    """What a run tells beside its CSV files.

    ``stats_every`` steps the gates and the selection of every NSA layer go to ``attention.jsonl``, 0 for never
    (nor where ``model.branches`` leaves a branch out);
    ``tensorboard`` writes all figures to event files, too (it needs the extra of that name).
    """

    tensorboard: bool = False
    stats_every: CountOrNone = 100


Action = Literal["warn", "dump", "halt", "restart"]


class WatchdogSection(Section):
    """When a run counts as stalled, diverged or degraded, and what is done then.

    A rank beats, and the watchdog looks, every ``interval_s`` seconds. The run is *stalled* when a rank has been silent
    for ``silent_s``, or in one phase for longer than ``stall_s`` and ``stall_factor`` median steps; in ``checkpoint``,
    ``evaluate``, ``compile`` and ``idle`` it may stay for ``pause_s``, and before its first step for ``startup_s``.

    It has *diverged* when loss or gradient are not finite, or the loss has been ``loss_rise`` nats above its best for
    ``loss_steps`` steps. It is *degraded* when throughput has been below ``throughput_fraction`` of its median for
    ``throughput_steps`` steps, when the share of a branch in the gates of a layer has been below ``gate_share`` in
    ``gate_reports`` reports, or when memory grew by ``memory_growth`` (a fraction) from each quarter of the last
    ``memory_steps`` steps to the next. The first ``warmup_steps`` steps count for neither throughput nor memory.

    Actions: ``warn`` says so; ``dump`` also has all ranks write their stacks; ``halt`` moreover asks the training to
    save and leave; ``restart`` has the ranks write their stacks and kills them, for the launcher to start them again.
    """

    enabled: bool = True
    interval_s: Seconds = 5.0
    silent_s: Seconds = 60.0
    stall_s: Seconds = 180.0
    stall_factor: Annotated[float, Field(ge=1)] = 10.0
    pause_s: Seconds = 1800.0
    startup_s: Seconds = 1800.0
    warmup_steps: CountOrNone = 20
    throughput_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    throughput_steps: Annotated[int, Field(ge=1, le=200)] = 20
    gate_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    gate_reports: Annotated[int, Field(ge=1, le=50)] = 5
    loss_rise: Annotated[float, Field(gt=0)] = 1.0
    loss_steps: Annotated[int, Field(ge=1, le=200)] = 20
    memory_growth: Annotated[float, Field(gt=0)] = 0.02
    memory_steps: Annotated[int, Field(ge=8, le=1000)] = 400
    on_stalled: Action = "dump"
    on_diverged: Action = "warn"
    on_degraded: Action = "warn"

    @property
    def restarts(self) -> bool:
        """Whether processes may be killed, to be started again."""
        return self.enabled and "restart" in (self.on_stalled, self.on_diverged, self.on_degraded)


class AcceptSection(Section):
    """What ``nsa-compile validate`` asks for before it says GO; ``None`` asks for nothing.

    The baseline reaches ``tokens_per_s`` and ``mfu``, a process among others the fraction ``scaling`` of the throughput
    of one alone. The held-out loss after the stability run is at most ``val_loss``. No function of Python takes more
    than the share ``python_share`` of a step, memory grows by at most the fraction ``memory_growth`` in the second half
    of the stability run, and each branch keeps ``gate_share`` of the gates in every layer.
    """

    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    mfu: Fraction | None = None
    scaling: Fraction | None = None
    val_loss: Annotated[float, Field(gt=0)] | None = None
    python_share: Fraction | None = 0.1
    memory_growth: Annotated[float, Field(ge=0)] | None = 0.05
    gate_share: Fraction | None = 0.01


class ProfileSection(Section):
    """What a run lets profilers see.

    ``nvtx`` opens named ranges around steps, their phases, checkpoints and passes and, inside compiled blocks, around
    the branches of attention, forward and backward: NVTX ranges of the domain ``nsa``, and regions of torch's profiler.
    """

    nvtx: bool = False


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: NSAConfig
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
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
        return _build_dataclass(NSAConfig, value) if isinstance(value, dict) else value

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
        if self.train.loss == "answers" and self.data.name not in SYNTHETIC:
            raise ValueError(
                f"train.loss = 'answers' must be 'all' for data.name = '{self.data.name}': "
                f"which tokens are answers is known of {' and '.join(SYNTHETIC)}"
            )
        if self.model.attention == "nsa" and self.train.seq_len < self.model.pattern.compress_block:
            raise ValueError(
                f"train.seq_len = {self.train.seq_len} must be at least model.pattern.compress_block = "
                f"{self.model.pattern.compress_block}, or no query ever sees a compressed block"
            )
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

    def checkpointed_blocks(self) -> frozenset[int]:
        """The blocks that ``train.activation_checkpointing`` names.

        Raises:
            ValueError: it names none that exist.
        """
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

    def to_yaml(self) -> str:
        """The configuration with every default filled in, as YAML that loads to an equal configuration."""
        return yaml.safe_dump(self.plain(), sort_keys=False)

    def plain(self) -> dict[str, Any]:
        """The configuration as it is read from a file: nested dicts of numbers, texts and lists."""
        return self.model_dump(mode="json")


def _build_dataclass(schema: Any, values: dict[str, Any]) -> Any:
    """An instance of a self-validating dataclass from a mapping; messages begin with the dotted field."""
    values = dict(values)
    for field in dataclasses.fields(schema):
        if field.name == "pattern" and isinstance(values.get("pattern"), dict):
            try:
                values["pattern"] = _build_dataclass(SparsePattern, values["pattern"])
            except ValueError as error:
                raise ValueError(f"pattern.{error}") from None
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ValueError(f"{field.name} is missing and has no default")
    return schema(**values)


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
    for override in overrides:
        _apply_override(values, override)
    _reject_unknown_keys(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_describe(error)) from None


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
        raise UserError(f"configuration file '{name}' does not exist; check the path given to --config") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        if os.path.isdir(path):
            reason = os.strerror(errno.EISDIR)
        raise UserError(f"configuration file '{name}' cannot be read: {reason}; give --config a YAML file") from None


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
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MAX_VALUES:
            raise _TooManyValues
        return super().compose_node(parent, index)

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


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"--set '{shortened(override)}' must have the form KEY=VALUE, for example --set train.steps=100"
        )
    if key not in _dotted_keys():
        raise UserError(_unknown_key(key))
    parts = key.split(".")
    for part in parts[:-1]:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):  # the file gave a plain value for a section; the override mends that
            inner = values[part] = {}
        values = inner
    values[parts[-1]] = _parse_yaml(text, f"the value of --set '{shortened(override)}'")


def _dotted_keys(schema: Any = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration as a dotted path, sections included."""
    if dataclasses.is_dataclass(schema):
        names = [field.name for field in dataclasses.fields(schema)]
    else:
        names = list(schema.model_fields)
    for name in names:
        yield prefix + name
        if prefix + name in _SECTIONS:
            yield from _dotted_keys(_SECTIONS[prefix + name], f"{prefix}{name}.")


# Sections and what describes their keys: pydantic models, and the model's own dataclasses.
_SECTIONS: dict[str, Any] = {
    "run": RunSection,
    "model": NSAConfig,
    "model.pattern": SparsePattern,
    "data": DataSection,
    "train": TrainSection,
    "optim": OptimSection,
    "ddp": DDPSection,
    "compile": CompileSection,
    "log": LogSection,
    "watchdog": WatchdogSection,
    "accept": AcceptSection,
    "profile": ProfileSection,
}


def _reject_unknown_keys(values: dict[str, Any], section: str = "") -> None:
    known = set(_dotted_keys())
    for name, value in values.items():
        key = f"{section}{name}"
        if key not in known:
            raise UserError(_unknown_key(key))
        if key in _SECTIONS and isinstance(value, dict):
            _reject_unknown_keys(value, f"{key}.")


def _unknown_key(key: str) -> str:
    key = shortened(key)
    known = list(_dotted_keys())
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    # `steps` alone, or a key under the wrong section: compare the last parts too.
    leaf = key.rpartition(".")[2]
    by_leaf = difflib.get_close_matches(leaf, [name.rpartition(".")[2] for name in known], n=1, cutoff=0.7)
    if not close and by_leaf:
        close = [name for name in known if name.rpartition(".")[2] == by_leaf[0]][:1]
    section = key.rpartition(".")[0]
    if close:
        advice = f"did you mean '{close[0]}'?"
    elif section in _SECTIONS:
        names = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
        advice = f"'{section}' has {', '.join(names)}"
    else:
        advice = f"the sections are {', '.join(name for name in known if '.' not in name)}"
    return f"unknown configuration key '{key}'; {advice}"


def _describe(error: ValidationError) -> str:
    """One line for a validation error: its first finding and how many others there are."""
    first, *others = error.errors()
    # Without the index into a list: the key to change is the list.
    key = ".".join(part for part in first["loc"] if isinstance(part, str))
    if key in _SECTIONS and first["type"] != "value_error":
        text = f"{key} = {_short(first['input'])} is not allowed: it is a section, with keys of its own"
    elif first["type"] == "missing":
        text = f"{key} is missing and has no default"
    elif first["type"] == "value_error":
        # A rule of the model's own or between sections: its message begins with the field, which completes the key.
        field, _, rule = str(first["ctx"]["error"]).partition(" ")
        key = ".".join(filter(None, (key, field)))
        text = f"{key} {rule}"
    else:
        message = first["msg"][:1].lower() + first["msg"][1:]
        text = f"{key} = {_short(first['input'])} is not allowed: {message}"
    more = f" (and {len(others)} more)" if others else ""
    return f"{text}; change it in the file or with --set {key}=VALUE{more}"


def _short(value: Any) -> str:
    return shortened(repr(value))
